"""Processes of a real launcher: the bytes of one process, and how they end when one of them fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launched import ACCELERATE, STOPPING, TORCHRUN, environment, quantize
from runs import assert_same
from tiny import write_job

from quantizers.output import journal
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare

pytestmark = pytest.mark.slow
JOB = {"layers": 3, "words": 60, "samples": 40}  # three chunks of tokens: each process has some


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), **JOB)


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """The output of one process, which is this one."""
    run(prepare(str(recipe)), Options(recipe.parent / "by-1", torch.device("cpu")))
    return recipe.parent / "by-1"


@pytest.mark.every
def test_a_killed_process_and_a_launcher_that_restarts(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """The other process ends with one line, although its launcher's SIGTERM arrives first; a second attempt resumes."""
    launcher = ["-m", "torch.distributed.run", "--max-restarts", "1", "--nproc-per-node"]
    killed = {"KILLED_RANK": "1", "KILLED_ATTEMPT": "0", "SLOW_LAST_WORDS": "1"}
    code, said = quantize(recipe, tmp_path / "output", 2, launcher, **killed)
    assert code == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("quantize: ")]
    assert line.startswith("quantize: rank 0 of 2 on ")
    assert "give the same command again" in line
    assert "one of 2 processes" in said
    assert_same(tmp_path / "output", whole)


def test_ctrl_c(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """A terminal interrupts the launcher, and that its processes; another launcher resumes with another number."""
    command = [sys.executable, *TORCHRUN, "2", str(STOPPING), "run", str(recipe), "--output", str(tmp_path / "output")]
    launcher = subprocess.Popen(command, env=environment(HALTED_RANK="1"), stderr=subprocess.PIPE, text=True)
    while not journal.layer_file(journal.work_folder(tmp_path / "output"), 0).exists():
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate()
    lines = [line for line in said.splitlines() if line.startswith("quantize: ")]
    assert lines == ["quantize: interrupted by SIGINT; give the same command again to resume"]
    assert "closing signal SIGKILL" not in said
    assert journal.unfinished(tmp_path / "output")
    code, said = quantize(recipe, tmp_path / "output", 3, ACCELERATE)
    assert code == 0, said
    assert "one of 3 processes" in said
    assert_same(tmp_path / "output", whole)


class Machines:
    """Folders `a` and `b`, with a copy of the job in each, and a launcher for each on a loopback address of its own."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "a", folder / "b"]
        for own in self.folders:
            write_job(own, **JOB)

    def run(self, each: int, second: dict[str, str] | None = None) -> tuple[list[int], list[list[str]]]:
        """How both launchers end, and the lines of `quantize` on each machine; what they print is in the file `log`.

        Args:
            each: processes on each machine.
            second: added to the environment of the second.
        """
        port, launchers = free_port(), []
        for number, folder in enumerate(self.folders):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("--local-addr", f"127.0.0.{number + 1}", str(STOPPING), "run", "recipe.yaml", "--output", "output"),
            ]
            own = environment(**((second or {}) if number else {}))
            with (folder / "log").open("wb") as log:
                launchers.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=own))
        ended = [launcher.wait() for launcher in launchers]
        logs = [(folder / "log").read_text().splitlines() for folder in self.folders]
        return ended, [[line for line in found if line.startswith("quantize: ")] for found in logs]


def free_port() -> int:
    """One below those that a kernel gives away by itself, so that no other program gets it in between."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.every)])
def test_two_machines_give_the_bytes_of_one_process(each: int, tmp_path: Path, whole: Path) -> None:
    """Without a shared disk; the second machine keeps nothing."""
    machines = Machines(tmp_path)
    ended, said = machines.run(each)
    assert ended == [0, 0], said
    assert_same(machines.folders[0] / "output", whole)
    assert not (machines.folders[1] / "output").exists()


def test_a_process_that_differs(tmp_path: Path) -> None:
    """Refused before anything is written, with its name in the one line of both machines."""
    machines = Machines(tmp_path)
    ended, said = machines.run(1, {"OMP_NUM_THREADS": "2"})
    assert ended == [1, 1]  # which is the launchers' own; the processes end with 2
    for (line,) in said:
        assert line.startswith("quantize: rank 1 of 2 on ")
        assert "has machine.threads 2, but rank 0 has 1; set OMP_NUM_THREADS=1 for all" in line
    assert all("exitcode  : 2" in (folder / "log").read_text() for folder in machines.folders)
    assert not list(tmp_path.rglob("layers"))
