"""What a user meets before anything is computed: the version, the shell's completion, where output goes."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import Command
from conftest import REPOSITORY, Finished

import quantizers
from quantizers.device import triton_support


def test_the_version_says_what_the_program_runs_on(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """With two cards that are made up here, since no test has one."""
    card = SimpleNamespace(name="a card", total_memory=96 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton_support, "why_not", lambda card: "a reason" if card.index else "")
    triton = SimpleNamespace(__version__="3.7.1")
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert command("--version") == 0
    lines = command.out.splitlines()
    assert re.fullmatch(rf"quantize {re.escape(quantizers.__version__)} \(files [0-9a-f]{{12}}\)", lines[0])
    assert lines[1] == f"python {platform.python_version()}, torch {torch.__version__}, CUDA 13.0"
    assert f"transformers {version('transformers')}, compressed-tensors {version('compressed-tensors')}" in lines[2]
    assert lines[3] == "cuda:0: a card, 96.0 GiB, kernels: triton 3.7.1"
    assert lines[4] == "cuda:1: a card, 96.0 GiB, kernels: torch (a reason)"
    assert lines[5].startswith("cpu: ")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert command("--json", "--version") == 0
    found = json.loads(command.out)
    assert (found["cuda"], found["rocm"]) == (None, None)
    assert [one["device"] for one in found["devices"]] == ["cuda:0", "cuda:1", "cpu"]
    assert command("--version") == 0
    assert command.out.splitlines()[1].endswith("CPU build")


def test_json_before_a_command_is_refused(command: Command) -> None:
    assert command("--json", "recipes") == 2
    assert command.err == "quantize: --json stands behind a command, as in `quantize plan RECIPE --json`\n"


SLOW_TO_IMPORT = {"torch", "transformers", "numpy", "quantizers.recipe.schema", "quantizers.system.schema"}


@pytest.mark.parametrize("words", [["-h"], ["run", "-h"], ["plan", "-h"], ["verify", "-h"]])
def test_help_imports_nothing_slow(words: list[str]) -> None:
    """torch takes seconds; the schemas a quarter of one, with pydantic, which typer imports for a command's help."""
    program = f"import sys; from quantizers.cli import main; sys.argv[1:] = {words}\n"
    program += f"try: main.main()\nfinally: print(sorted({SLOW_TO_IMPORT} & sys.modules.keys()))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    usage, *_, imported = done.stdout.strip().splitlines()
    assert usage.startswith(" ".join(["Usage: quantize", *words[:-1]]))
    assert imported == "[]"


def test_two_outputs_are_refused(finished: Finished, command: Command) -> None:
    assert command("run", finished.recipe, "a", "-o", "b") == 2
    assert command.err == "quantize: two outputs are given, a and --output b; leave one out\n"
    same = ("run", finished.recipe, finished.folder, "-o", finished.folder)
    assert command(*same) == 0  # it is finished already


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("quantize ver", ["verify"]),
        ("quantize run tiny", ["tiny-minimax-m2-fp8-int4"]),
        ("quantize run minimax-m2.1-fp8-int4-", ["minimax-m2.1-fp8-int4-131k", "minimax-m2.1-fp8-int4-kv8"]),
        ("quantize run x --dev", ["--device", "--device-memory"]),
    ],
)
def test_the_shell_completes_commands_options_and_shipped_recipes(
    words: str, completed: list[str], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("_QUANTIZE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert command() == 0
    assert command.out.split() == completed


def test_a_stitch_without_output_says_where_it_writes(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Before, a missing --output was an error of run and of stitch (run: see recipe/test_portable.py)."""
    monkeypatch.chdir(tmp_path)
    words = ("stitch", "--source", finished.source, "--experts", finished.folder, "--repair-router", "--device", "cpu")
    assert command(*words) == 0
    said = command
    assert said.err.splitlines()[0] == "output: out/output-stitched (another with --output)"
    assert "\noutput    out/output-stitched: report.json, " in said.out
    assert command("verify", "out/output-stitched") == 0  # report.json names the shipped source
    assert "no differences" in command.out
