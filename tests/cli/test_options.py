"""What a user meets before anything is computed: the version, the shell's completion, where output goes."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from commands import quantize
from conftest import Finished


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"quantize {version('moe-quantizers')}\n"


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("quantize ver", ["verify"]),
        ("quantize run tiny", ["tiny-minimax-m2-fp8-int4"]),
        ("quantize run minimax-m2.1", ["minimax-m2.1-fp8-int4", "minimax-m2.1-fp8-int4-131k"]),
        ("quantize run x --dev", ["--device", "--device-memory"]),
    ],
)
def test_the_shell_completes_commands_options_and_shipped_recipes(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_QUANTIZE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert quantize(monkeypatch) == 0
    assert capsys.readouterr().out.split() == completed


def test_a_stitch_without_output_says_where_it_writes(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, a missing --output was an error of run and of stitch (run: see recipe/test_portable.py)."""
    monkeypatch.chdir(tmp_path)
    words = ("stitch", "--source", finished.source, "--experts", finished.folder, "--repair-router", "--device", "cpu")
    assert quantize(monkeypatch, *words) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "output: out/output-stitched (another with --output)"
    assert said.out.splitlines()[-1] == "output    out/output-stitched"
    assert quantize(monkeypatch, "verify", "out/output-stitched") == 0  # report.json names the shipped source
    assert "no differences" in capsys.readouterr().out
