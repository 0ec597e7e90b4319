"""The schema of a calibration set, and the sets that are shipped."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from quantizers.calibration.set import fill, placeholders, read_set, slug
from quantizers.system.errors import CalibrationError
from quantizers.system.shipped import shipped

SETS = shipped("calibration")
SOURCE = "  - {dataset: a.jsonl, columns: [text], shape: text, samples: 1, category: math}\n"


def write(folder: Path, sources: str, head: str = "") -> Path:
    path = folder / "set.yaml"
    path.write_text(f"name: test\nsequence_length: 64\n{head}sources:\n{sources}", encoding="utf-8")
    return path


def test_the_hub_sets_have_the_published_counts() -> None:
    calibration = read_set(SETS / "software-engineer.yaml")
    assert len(calibration.sources) == 55
    assert sum(source.samples for source in calibration.sources if source.samples != "all") == 590 - 228
    assert (calibration.sequence_length, calibration.seed) == (8192, 42)
    by_shape = Counter(source.shape for source in calibration.sources)
    assert by_shape == {"chat": 14, "sharegpt": 15, "prompt-answer": 20, "text": 5, "code-contests": 1}
    assert sum(source.streaming for source in calibration.sources) == 25
    creative = read_set(SETS / "creative-writing.yaml").sources
    assert (len(creative), sum(source.samples for source in creative if source.samples != "all")) == (43, 411 - 48)


@pytest.mark.parametrize("name", ["software-engineer", "creative-writing", "embedded", "held-out"])
def test_every_shipped_set_lists_the_languages(name: str) -> None:
    languages = read_set(SETS / f"{name}.yaml").languages
    assert (len(languages.programming), len(languages.spoken)) == (1 if name == "creative-writing" else 60, 12)
    assert languages.required


def test_slug() -> None:
    names = ("C", "C++", "C#", "Bash/Shell", "x86-64 ASM", "Visual Basic")
    assert list(map(slug, names)) == ["c", "cpp", "csharp", "bash-shell", "x86-64-asm", "visual-basic"]


def test_prompts_are_filled() -> None:
    template = "{spoken_language}, then {programming_language}"
    assert placeholders(template) == ["programming", "spoken"]
    assert fill(template, {"programming": "C++", "spoken": "Hindi"}) == "Hindi, then C++"


@pytest.mark.parametrize(
    ("sources", "line", "message"),
    [
        (SOURCE.replace("shape: text", "shape: poem"), 4, "sources[0].shape: "),
        (SOURCE.replace("samples: 1", "samples: 0"), 4, "should be greater than or equal to 1 or should be 'all', not"),
        (SOURCE.replace("samples: 1", "samples: 1, sequence_length: 1"), 4, "sources[0].sequence_length: should"),
        (SOURCE.replace("samples: 1", "samples: true"), 4, "should be a valid integer or should be 'all'"),
        (SOURCE.replace("samples: 1", "samples: few"), 4, "should be a valid integer or should be 'all'"),
        (SOURCE.replace("math}", "math, promt: x}"), 4, "sources[0].promt: unknown key (did you mean prompt?)"),
        (SOURCE.replace("category: math", "category: 5"), 4, "should be a valid string or must be a mapping of keys"),
        (SOURCE.replace("category: math", "category: ' '"), 4, "should have at least 1 character"),
        (SOURCE.replace("[text]", "[]"), 4, "the shape text reads 1 columns, not 0"),
        (SOURCE.replace("[text]", "[1]"), 4, "sources[0].columns[0]: "),
        (SOURCE.replace("[text]", "text"), 4, "sources[0].columns: "),
        (SOURCE.replace("[text]", "[a, b]"), 4, "the shape text reads 1 columns, not 2"),
        (SOURCE.replace("a.jsonl", "no such id"), 4, "neither a Hub id nor a file"),
        (SOURCE.replace("a.jsonl", "a.jsonl.gz"), 4, "neither a Hub id nor a file in .jsonl, .json, .parquet"),
        (SOURCE.replace("a.jsonl", "a.jsonl, revision: v1"), 4, "a local file has neither"),
        (SOURCE.replace("a.jsonl", "a.jsonl, split: test"), 4, "a local file is one split, train"),
        (SOURCE.replace("math}", 'math, prompt: "In {language}"}'), 4, "unknown placeholder {language}"),
        (SOURCE.replace("math}", 'math, prompt: "In {spoken_language}"}'), 1, "languages.spoken is empty"),
        ("  []\n", 3, "sources: should have at least 1 item"),
        (SOURCE + SOURCE.replace("shape: text", "shape: text, shape: text"), 5, "sources[1].shape: given twice"),
    ],
)
def test_a_wrong_set_is_refused_in_one_line(tmp_path: Path, sources: str, line: int, message: str) -> None:
    path = write(tmp_path, sources)
    with pytest.raises(CalibrationError) as failure:
        read_set(path)
    assert failure.value.exit_code == 2
    assert str(failure.value).startswith(f"{path}:{line}: ")
    assert message in str(failure.value)
    assert "\n" not in str(failure.value)


def test_languages_must_be_distinct_and_assigning_needs_a_number(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="c and C are one language; keep one"):
        read_set(write(tmp_path, SOURCE, "languages: {programming: [C, c]}\n"))
    assigning = SOURCE.replace("samples: 1", "samples: all").replace("math}", '"spoken/{spoken_language}"}')
    with pytest.raises(CalibrationError, match="needs a number of samples, not all"):
        read_set(write(tmp_path, assigning, "languages: {spoken: [Hindi]}\n"))


def test_a_set_is_read_without_heavy_imports() -> None:
    code = (
        "import sys; from pathlib import Path; from quantizers.calibration.set import read_set;"
        "read_set(Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'py3langid'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(SETS / "software-engineer.yaml")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
