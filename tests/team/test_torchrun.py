"""Processes of a real launcher: the bytes of one process, in two families, and whoever is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import families
import pytest
from conftest import REPOSITORY
from runs import assert_same
from tiny import write_recipe

from quantizers.output import journal

pytestmark = pytest.mark.slow
STOPPING = REPOSITORY / "tests" / "stopping.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--num_processes"),
]


def quantize(recipe: Path, output: Path, count: int, launcher: list[str] = TORCHRUN, **more: str) -> tuple[int, str]:
    """The exit code of a run by so many processes, and what it said."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(STOPPING.parent)])}
    started = [*launcher, str(count)] if count > 1 else []
    command = [sys.executable, *started, str(STOPPING), "run", str(recipe), "--output", str(output), "--device", "cpu"]
    done = subprocess.run(command, env=os.environ | own | more, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module", params=["minimax_m2", "glm4_moe"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A recipe, and its output by one process. One family has a dense layer and a shared expert."""
    folder = tmp_path_factory.mktemp(request.param)
    families.write_job(folder, request.param)
    recipe = write_recipe(folder, words=60, samples=60)  # four blocks of rows: nobody is without
    code, said = quantize(recipe, folder / "by-1", 1)
    assert code == 0, said
    return recipe, folder / "by-1"


@pytest.mark.parametrize(("count", "launcher"), [(2, TORCHRUN), (3, TORCHRUN), (4, TORCHRUN), (2, ACCELERATE)], ids=str)
def test_the_bytes_of_one_process(count: int, launcher: list[str], job: tuple[Path, Path], tmp_path: Path) -> None:
    recipe, one = job
    code, said = quantize(recipe, tmp_path / "output", count, launcher)
    assert code == 0, said
    assert f"one of {count} processes" in said
    assert_same(tmp_path / "output", one)


@pytest.mark.parametrize(("victim", "count", "again"), [(1, 2, 1), (0, 2, 3)])
def test_whoever_is_killed(victim: int, count: int, again: int, job: tuple[Path, Path], tmp_path: Path) -> None:
    """The others end with one line that names it; then the run goes on with another number of processes."""
    recipe, one = job
    output = tmp_path / "output"
    code, said = quantize(recipe, output, count, KILLED_RANK=str(victim))
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("quantize: ")]
    assert line.startswith(f"quantize: rank {victim} of {count} on ")
    assert "is gone: killed, or out of memory? give the same command again to go on" in line
    assert journal.unfinished(output)
    code, said = quantize(recipe, output, again)
    assert code == 0, said
    assert_same(output, one)
