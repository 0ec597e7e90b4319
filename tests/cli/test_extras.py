"""A smaller installation: without what a reference, pictures, an importance matrix and language detection need."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from calibration_tokenizer import write_tokenizer
from conftest import REPOSITORY
from packaging.requirements import Requirement
from sets import rows_set

from quantizers.device.devices import versions
from quantizers.eval.report.plots import draw, saved
from quantizers.sets.check import check_set
from quantizers.system.errors import QuantizeError
from quantizers.system.extras import EXTRAS, lacking

TINY = "tiny-minimax-m2-fp8-int4"
INSTALL = "is not installed; `pip install 'moe-quantizers[{}]'`"
ENGINE = "experts.engine=llmcompressor"
# Each in turn, in one process; the exit codes follow on standard error.
COMMANDS = [
    (["recipes"], 0),
    (["plan", TINY], 0),
    (["plan", TINY, "--set", ENGINE], 2),
    (["run", TINY, "--set", ENGINE, "--output", "out"], 2),
    (["run", TINY, "--imatrix", "--output", "out"], 2),
    (["imatrix", TINY, "--output", "matrix.gguf"], 2),
]
PROGRAM = f"""
import sys
sys.modules["matplotlib"] = None
import quantizers
from quantizers.cli import main
for words, _ in {COMMANDS}:
    sys.argv[1:] = words
    try:
        main.main()
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""


def test_the_program_works_where_no_extra_can_be_imported(tmp_path: Path) -> None:
    """What needs one is refused in one line before it writes anything."""
    path = os.pathsep.join([str(REPOSITORY / "tests" / "without_extras"), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = f"quantize: --set {ENGINE}: llmcompressor {INSTALL.format('llmcompressor')}, or take gram"
    assert done.stderr.splitlines() == [
        *("0", "0"),
        *(refused, "2"),
        *(refused, "2"),
        *(f"quantize: --imatrix: gguf {INSTALL.format('imatrix')}", "2"),
        *(f"quantize: an importance matrix: gguf {INSTALL.format('imatrix')}", "2"),
    ]
    assert not list(tmp_path.iterdir())


def test_each_extra_is_declared_and_the_tests_have_all_of_them() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {
        extra: {Requirement(one).name for one in needed} for extra, needed in project["optional-dependencies"].items()
    }
    core = {Requirement(one).name for one in project["dependencies"]}
    for package, extra in EXTRAS.items():
        assert declared[extra] == {package}
        assert package not in core
    of_all, of_tests = (Requirement(project["optional-dependencies"][extra][0]) for extra in ("all", "test"))
    assert of_all.name == of_tests.name == project["name"]
    assert of_all.extras == set(EXTRAS.values()) - {"llmcompressor"}
    assert of_tests.extras == {"all", "llmcompressor", "accelerate"}


def test_without_matplotlib_there_are_no_pictures_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = f"matplotlib {INSTALL.format('pictures')}"
    with pytest.raises(QuantizeError) as lack:
        saved(lambda: pytest.fail("was drawn"), tmp_path / "x.png")
    assert str(lack.value) == line
    assert not list(tmp_path.iterdir())
    assert draw({}) == ({}, [f"no pictures: {line}"])


def test_without_language_identification_a_check_says_that_it_did_not_identify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    path = rows_set(tmp_path, [("spoken/german", "Guten Tag")], languages={"programming": [], "spoken": ["German"]})
    monkeypatch.setitem(sys.modules, "py3langid", None)
    report = check_set(path, tokenizer)
    line = f"the languages of 1 spoken text are not checked: py3langid {INSTALL.format('languages')}"
    assert (report["ok"], report["identified"]) == (True, 0)
    assert report["warnings"] == (line,)


def test_versions_name_llm_compressor_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking("llmcompressor"):
        pytest.skip("it takes no transformers after 5.17")
    every = versions()
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    assert versions() == {name: version for name, version in every.items() if name != "llmcompressor"} != every
