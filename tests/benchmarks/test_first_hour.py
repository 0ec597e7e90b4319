"""The first hour with a GPU, with a CPU in its place; and what is measured and said on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from tiny import write_job

from quantizers.planning.device_memory import device_memory
from quantizers.planning.job import prepare
from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes

SCRIPT, FIGURES = REPOSITORY / "scripts" / "first_hour_gpu.sh", REPOSITORY / "scripts" / "first_hour_figures.py"
STEPS = ["machine", "resume"]
FULL = ["machine", "full"]
OTHERS = ["machine", "cpu", "layer"]  # those that are left run what has tests of its own


def first_hour(output: Path, **variables: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit code, result and figure of each step, and what was said on standard error."""
    given = {"DEVICE": "cpu", "OUT": str(output), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment = os.environ | given | variables
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False, env=environment)
    table = output / "table.md"
    rows = [line.strip("| ").split(" | ") for line in table.read_text().splitlines()[2:]] if table.exists() else []
    assert not done.stdout or done.stdout.endswith(table.read_text())
    return done.returncode, {step: (result, figure) for step, result, figure, _ in rows}, done.stderr


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(STEPS, marks=pytest.mark.slow),
        pytest.param(FULL, marks=pytest.mark.every),
        pytest.param(OTHERS, marks=pytest.mark.every),
    ],
)
def test_the_first_hour_on_a_cpu(steps: list[str], tmp_path: Path) -> None:
    """At the smallest sizes."""
    recipe = write_job(tmp_path / "job", layers=3, words=12, samples=2, awq={"grid": 3})
    small = {"RECIPE": str(recipe), "HELD_OUT": str(recipe.parent / "held-out.yaml"), "STEPS": " ".join(steps)}
    small["FULL_FOLDER"] = str(tmp_path / "full")
    code, table, said = first_hour(tmp_path / "out", **small)
    logs = {step: (tmp_path / "out" / f"{step}.log").read_text() for step in table}
    assert list(table) == steps
    assert {step: result for step, (result, _) in table.items()} == dict.fromkeys(steps, "PASS"), (table, logs)
    assert (code, said) == (0, "")
    assert f"{torch.__version__}" in table["machine"][1]
    if "resume" in steps:
        assert re.fullmatch(r"the same bytes in \d\d files", table["resume"][1])
        assert "resuming after layer 1 of 3" in logs["resume"]
    elif "full" in steps:
        figure = (
            r"2 of 2 layers, .* s each; peak memory .* GB of the host, .* GB of the device; SIGKILL after layer 1; (.*)"
        )
        full = re.fullmatch(figure, table["full"][1])
        assert full
        assert full[1] == "the same bytes in 2 layers as without interruption"
        assert not (tmp_path / "full").exists()
    else:
        kl = re.fullmatch(r"the same \d gates; KL (\S+), of the CPU's output (\S+)", table["cpu"][1])
        assert kl
        assert kl[1] == kl[2] != "0.00000"
    code, _, said = first_hour(tmp_path / "out")
    assert (code, said) == (
        2,
        f"{tmp_path / 'out'}: holds an earlier hour; remove it, or give another folder with OUT=\n",
    )


@pytest.mark.slow
def test_what_goes_wrong_is_in_the_table(tmp_path: Path) -> None:
    """A step that fails does not keep the others from being done."""
    code, table, _ = first_hour(tmp_path / "out", STEPS="memory machine", RECIPE="nothing-of-that-name")
    assert code == 1
    assert table["memory"][0] == "FAIL"
    assert "nothing-of-that-name" in table["memory"][1]
    assert table["machine"][0] == "PASS"
    code, table, said = first_hour(tmp_path / "other", STEPS="machine nonsense")
    assert (code, table) == (2, {})
    assert said.startswith("STEPS: nonsense is no step; the steps are machine tests")


def test_a_step_whose_time_was_over_is_to_be_done_again(tmp_path: Path) -> None:
    """The run at real size goes on in its folder, which is kept."""
    measured = {"layers": [1, 2], "layer_seconds": 3.0, "processes": [], "memory": [2e9, {}, 0], "device_memory": 1e9}
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    python = tmp_path / "python"
    unfinished = f'[ "$1" = benchmarks/full_size.py ] && cat {tmp_path / "measured.json"} && exit 75'
    python.write_text(f'#!/bin/sh\n{unfinished}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    folder = tmp_path / "full"
    folder.mkdir()
    given = {"STEPS": "full", "PYTHON": str(python), "FULL_FOLDER": str(folder)}
    code, table, _ = first_hour(tmp_path / "out", **given)
    assert code == 1
    figure = "1 of 2 layers, 3.0 s each; peak memory 2.0 GB of the host, 1.0 GB of the device; not interrupted"
    assert table["full"] == ("unfinished", f"{figure}; not compared yet")
    assert folder.exists()


@pytest.fixture
def figures(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Exit code and line of scripts/first_hour_figures.py, for these objects as its files."""

    def ask(command: str, *contents: Any) -> tuple[int, str]:
        files = []
        for number, content in enumerate(contents):
            files.append(str(tmp_path / f"{number}.json"))
            Path(files[-1]).write_text(json.dumps(content))
        words = [sys.executable, str(FIGURES), command, *files]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=PATHS)
        assert not done.stderr
        return done.returncode, done.stdout.strip()

    return ask


PATHS = os.environ | {"PYTHONPATH": str(REPOSITORY)}


def test_other_gates_or_another_kl_fail(figures: Callable[..., tuple[int, str]]) -> None:
    def report(kl: bool) -> dict[str, Any]:
        return {"gates": [{"name": "audit", "passed": True}, {"name": "kl", "passed": kl}]}

    def evaluation(*kl: float) -> dict[str, Any]:
        return {"candidates": [{"kl": {"mean": one}} for one in kl]}

    said = "the same 2 gates; KL 0.01000, of the CPU's output 0.01050"
    assert figures("gates", report(True), report(True), evaluation(0.01, 0.0105)) == (0, said)
    assert figures("gates", report(True), report(True), evaluation(0.01, 0.012))[0] == 1
    code, line = figures("gates", report(True), report(False), evaluation(0.01, 0.01))
    assert (code, line.partition(";")[0]) == (1, "gates differ: kl")


def test_a_layers_line(figures: Callable[..., tuple[int, str]]) -> None:
    rates = {"matmul": 5e14, "matmul_float32": 5e13, "copy": 2.5e12, "launch": 6e-6}
    phases = [{"seconds": 2.0}, {"seconds": 3.5}]
    measured = {"phases": phases, "rates": rates, "run": 5400, "tokens": 131072, "sizes": {"experts": 256}}
    said = "5.50 s for 131,072 tokens and 256 experts, 1.5 h for the run; matmul 500, float32 50 TFLOP/s, "
    assert figures("layer", measured) == (0, said + "copy 2500 GB/s, launch 6.0 us")


def test_a_run_at_real_size(figures: Callable[..., tuple[int, str]]) -> None:
    """It passes once all layers are done, with the bytes of a run without interruption."""

    def run(done: int, **further: Any) -> dict[str, Any]:
        killed = {"command": "run", "ended_by": "SIGKILL", "layers_done": 1}
        memory = {"memory": [17.9e9, {}, 0], "device_memory": 23.7e9}
        return {"layers": [done, 12], "layer_seconds": 9.87, "processes": [killed]} | memory | further

    said = "s each; peak memory 17.9 GB of the host, 23.7 GB of the device; SIGKILL after layer 1; "
    reference = {"layers": 2, "same": True}
    same = f"12 of 12 layers, 9.9 {said}the same bytes in 2 layers as without interruption"
    assert figures("full", run(12, reference=reference)) == (0, same)
    assert figures("full", run(12, reference=reference | {"same": False}))[0] == 1
    assert figures("full", run(5)) == (1, f"5 of 12 layers, 9.9 {said}not compared yet")


@pytest.mark.every
@pytest.mark.parametrize(("device", "accelerator"), [("cpu", False), ("cuda:1", True)])
def test_the_least_memory_with_which_the_tiny_model_is_made_again(device: str, accelerator: bool) -> None:
    """A byte less is refused; on a CPU one unit of two is held with it, on a GPU neither inputs nor states."""
    words = [sys.executable, str(FIGURES), "least", "tiny-minimax-m2-fp8-int4", device]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=PATHS)
    limit = parse_bytes(done.stdout, "least")
    job = prepare("tiny-minimax-m2-fp8-int4")
    tokens, longest = 76_544, 256  # as the run says, and the set's sequence_length
    whole = device_memory(job.plan, job.facts, longest, accelerator, 4 * 2**30, tokens)
    less = device_memory(job.plan, job.facts, longest, accelerator, limit, tokens)
    held = [(memory.resident, memory.inputs, memory.states) for memory in (whole, less)]
    assert held == ([(1, True, True), (1, False, False)] if accelerator else [(2, False, False), (1, False, False)])
    with pytest.raises(InputError, match="of device memory is too little"):
        device_memory(job.plan, job.facts, longest, accelerator, limit - 1, tokens)
