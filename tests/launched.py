"""Runs by processes of a real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from conftest import REPOSITORY

STOPPING = REPOSITORY / "tests" / "stopping.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"),
    *("--dynamo_backend", "no", "--num_processes"),
]


def environment(**more: str) -> dict[str, str]:
    """Of a process with one thread."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(STOPPING.parent)])}
    return os.environ | own | more


def quantize(
    recipe: Path,
    output: Path,
    count: int,
    launcher: list[str] = TORCHRUN,
    *,
    options: Sequence[str] = (),
    **more: str,
) -> tuple[int, str]:
    """The exit code of a run by so many processes, and what it said; `more` are environment variables."""
    started = [*launcher, str(count)] if count > 1 else []
    command = [sys.executable, *started, str(STOPPING), "run", str(recipe), "--output", str(output), "--device", "cpu"]
    done = subprocess.run([*command, *options], env=environment(**more), capture_output=True, text=True, check=False)
    return done.returncode, done.stderr
