"""What is said about a set: proofs of the shipped one, duplicates, languages, differences, pictures."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from quantizers.calibration.check import SetReport, check_set, find_duplicates
from quantizers.calibration.diff import diff_sets
from quantizers.calibration.language_id import CODES, identify
from quantizers.calibration.load_set import progress_line
from quantizers.calibration.set import read_set
from quantizers.calibration.view import render, render_diff, render_samples, show_samples
from quantizers.system.errors import CalibrationError
from quantizers.system.package_data import shipped

SETS = shipped("calibration")
HEAD = "name: test\nsequence_length: 40\nlanguages: {programming: [C, D], spoken: [Hindi, German]}\nsources:\n"


@pytest.fixture(scope="module")
def embedded(tokenizer: str) -> SetReport:
    return check_set(SETS / "embedded.yaml", tokenizer)


def shown(renderable: RenderableType) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def write_set(folder: Path, rows: list[tuple[str, str]], name: str = "set") -> Path:
    """A set of (category, text)."""
    lines = [json.dumps({"category": category, "text": text}) for category, text in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    source = f"{{dataset: {name}.jsonl, columns: [text], shape: text, samples: all, category: {{column: category}}}}"
    (folder / f"{name}.yaml").write_text(f"{HEAD}  - {source}\n")
    return folder / f"{name}.yaml"


def test_the_embedded_set_holds_what_it_claims(embedded: SetReport) -> None:
    assert embedded.findings == ()
    assert embedded.ok
    assert embedded.missing == {"programming": [], "spoken": []}
    assert (len(embedded.languages["programming"]), len(embedded.languages["spoken"])) == (60, 12)
    assert min(embedded.languages["programming"].values()) >= 3
    assert min(embedded.languages["spoken"].values()) >= 4
    assert embedded.held_out == str(SETS / "held-out.yaml")
    assert (embedded.duplicates, embedded.shared, embedded.mismatches) == ((), (), ())
    assert embedded.identified == 48
    fields = {row.category for row in embedded.categories if "/" not in row.category}
    assert len(fields) == 16
    assert {"tool-use", "logs", "math", "science", "medicine", "finance", "fiction", "advice"} <= fields


def test_the_held_out_set_has_every_category(embedded: SetReport, tokenizer: str) -> None:
    held_out = check_set(SETS / "held-out.yaml", tokenizer)
    assert held_out.ok
    assert held_out.held_out is None
    assert held_out.identified == 12
    short = {row.category for row in held_out.categories if not row.category.startswith("long/")}
    assert short == {row.category for row in embedded.categories}
    text = shown(render(held_out))
    assert " cut at 256 or 8,192, which lost " in text
    assert "of these 8 long ones, " in text


def test_the_embedded_texts_are_long_enough() -> None:
    for source in read_set(SETS / "embedded.yaml").sources[:2]:
        for line in (SETS / source.dataset).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["category"].startswith("code/"):
                assert row["answer"].count("\n") >= 31, row["prompt"]  # 30 and the fence
            elif row["category"] not in ("spoken/chinese", "spoken/japanese"):
                assert len(row["answer"].split()) >= 150, row["prompt"]
            else:
                assert len(row["answer"]) >= 400, row["prompt"]


def test_the_report_is_one_json_object(embedded: SetReport) -> None:
    data = json.loads(json.dumps(embedded.as_json()))
    assert data["ok"] is True
    assert data["summary"]["samples"] == sum(row["samples"] for row in data["categories"]) == 299
    assert data["summary"]["tokens"] == sum(row["tokens"] for row in data["categories"])
    assert len(data["summary"]["digest"]) == 64


def test_faults_are_found_and_named(tmp_path: Path, tokenizer: str) -> None:
    long = "one two three four five six seven eight nine ten eleven twelve"
    german = "Der Zug fährt heute leider nicht, weil auf der Strecke seit dem Morgen gebaut wird."
    rows = [("code/c", long), ("x", long.upper() + "!"), ("x", long + " thirteen"), ("spoken/hindi", german)]
    path = write_set(tmp_path, rows)
    write_set(tmp_path, [("x", german + " Bitte nehmen Sie den Bus.")], "other")
    report = check_set(path, tokenizer, tmp_path / "other.yaml")
    assert not report.ok
    assert report.missing == {"programming": ["D"], "spoken": ["German"]}
    places = [f"set.jsonl:{number}" for number in (1, 2, 3, 4)]
    assert [(twins.first, twins.second, twins.similarity) for twins in report.duplicates] == [
        (places[0], places[1], 1.0),
        (places[0], places[2], 0.889),
        (places[1], places[2], 0.889),
    ]
    assert [(m.place, m.claimed, m.identified) for m in report.mismatches] == [(places[3], "Hindi", "German")]
    assert [(twins.first, twins.second) for twins in report.shared] == [(places[3], "other.jsonl:1")]
    text = shown(render(report))
    assert "no sample shows D (programming)" in text
    assert "reads like German" in text
    assert f"{places[1]} repeats {places[0]} (similarity 1.0)" in text


def test_held_out_is_looked_for_beside_the_set(tmp_path: Path, tokenizer: str) -> None:
    path = write_set(tmp_path, [("code/c", "a text of its own")])
    assert check_set(path, tokenizer).held_out is None
    write_set(tmp_path, [("code/c", "a text of its own")], "held-out")
    assert len(check_set(path, tokenizer).shared) == 1


def test_a_required_language_is_a_finding_here_and_not_an_error(tmp_path: Path, tokenizer: str) -> None:
    path = write_set(tmp_path, [("code/c", "a text of its own")])
    path.write_text(path.read_text().replace("[Hindi, German]}", "[Hindi], required: true}"))
    assert check_set(path, tokenizer).findings == (
        "no sample shows D (programming)",
        "no sample shows Hindi (spoken)",
    )


@pytest.mark.parametrize(
    ("first", "second", "similarity"),
    [
        ("the same words", "The  same, WORDS.", 1.0),
        ("short", "other", None),
        ("一二三四五六七八九十", "一二三四五六七八九十。", 1.0),
        ("一二三四五六七八九十", "一二三四五六七八九百", 5 / 7),
        ("a b c d e f g h i j", "a b c d e f g h i j a b c d e f g h i j", 6 / 10),
        ("", "", None),
        ("a a a a a a", "a a a a a a a", 0.999),
    ],
)
def test_similarity(first: str, second: str, similarity: float | None) -> None:
    found = find_duplicates([first, "something in between", second])
    assert [pair for *pair, _ in found] == ([] if similarity is None else [[0, 2]])
    if similarity is not None:
        assert found[0][2] == pytest.approx(similarity)


def test_every_spoken_language_of_the_sets_can_be_identified() -> None:
    assert set(read_set(SETS / "software-engineer.yaml").languages.spoken) <= set(CODES)
    assert identify("This is plainly an English sentence about the weather.") == "English"


def test_the_table_shows_figures_and_nothing_wrong(embedded: SetReport) -> None:
    text = shown(render(embedded))
    assert "programming languages, 60 of 60" in text
    assert "language identification confirms 48 of 48 spoken texts" in text
    assert "nothing contradicts the set" in text
    assert embedded.summary["digest"] in text


def test_dropped_rows_are_shown(tmp_path: Path, tokenizer: str) -> None:
    path = write_set(tmp_path, [("code/c", "some text"), ("x", "")])
    path.write_text(path.read_text().replace("samples: all", "samples: 1"))
    seeds = [path.read_text().replace("sources:", f"seed: {seed}\nsources:") for seed in range(8)]
    texts = []
    for seeded in seeds:
        path.write_text(seeded)
        texts.append(shown(render(check_set(path, tokenizer))))
    assert any("dropped 1 of set.jsonl: an empty text (first " in text for text in texts)


def test_samples_are_shown_as_the_model_reads_them(tokenizer: str) -> None:
    samples = show_samples(SETS / "embedded.yaml", 3, tokenizer)
    assert [sample.position for sample in samples] == [0, 99, 199]
    text = shown(render_samples(samples))
    assert "0: code/zephyr" in text
    assert "[turn]user" in text
    assert len(show_samples(SETS / "held-out.yaml", 1000, tokenizer)) == 88 + 8


def test_a_difference_names_every_change(tmp_path: Path) -> None:
    before = SETS / "software-engineer.yaml"
    assert not diff_sets(before, before)
    assert shown(render_diff(diff_sets(before, before))) == "no difference\n"
    after = tmp_path / "after.yaml"
    text = before.read_text(encoding="utf-8").replace("seed: 42", "seed: 7").replace("CUDA, Vulkan", "CUDA, Odin")
    text = text.replace("fka/awesome-chatgpt-prompts", "fka/prompts").replace("samples: 50", "samples: 51")
    after.write_text(text, encoding="utf-8")
    diff = diff_sets(before, after)
    assert diff.settings == {"seed": (42, 7)}
    assert diff.languages == {"programming": (["Odin"], ["Vulkan"])}
    assert diff.added == {"fka/prompts train": 8}
    assert diff.removed == {"fka/awesome-chatgpt-prompts train": 8}
    assert diff.changed == {"deepmind/code_contests train": {"samples": (50, 51)}}
    assert diff.samples == {"code": (190, 191)}
    shown_text = shown(render_diff(diff))
    assert "deepmind/code_contests train: samples: 50 -> 51" in shown_text
    assert "+ programming Odin" in shown_text
    json.dumps(asdict(diff))


def test_wrong_sets_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        diff_sets(SETS / "embedded.yaml", tmp_path / "missing.yaml")


def test_progress_is_one_moving_line() -> None:
    """On a terminal: drawn again over itself, and wiped away at the end. Elsewhere nothing."""
    again, wiped = "\r\x1b[2K", "\n\x1b[?25h\r\x1b[1A\x1b[2K"
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    pipe = Console(file=io.StringIO(), force_terminal=False)
    for console in (terminal, pipe):
        with progress_line(console) as progress:
            progress(3, "some/dataset")
            progress(1234, "other/dataset")
    drawn = terminal.file.getvalue()
    assert drawn.endswith(wiped)
    assert "\n" not in drawn.removesuffix(wiped)
    first, *_, last = drawn.removesuffix(wiped).split(again)[1:]
    assert "loading calibration data" in first
    assert "calibration: 1,234 samples, now other/dataset" in last
    assert pipe.file.getvalue() == ""
