"""Two machines, each with its own folder and copy of the source: here two launchers on two loopback addresses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY
from runs import assert_same
from tiny import write_job

from quantizers.output import journal

pytestmark = pytest.mark.slow
JOB = {"layers": 3, "words": 60, "samples": 40}  # three blocks of rows: none of the processes is without
STOPPING = REPOSITORY / "tests" / "stopping.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(STOPPING.parent)]),
}


def free_port() -> int:
    """One below those that a kernel hands out by itself, so that no other program gets it in between."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


class Machines:
    """Folders `a` and `b`, with a copy of the job in each, and a launcher for each."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / "a", folder / "b"]
        for own in self.folders:
            write_job(own, **JOB)

    def start(
        self, each: int, *more: str, second: dict[str, str] | None = None, **both: str
    ) -> list[subprocess.Popen[bytes]]:
        """A launcher on each machine, with so many processes each; what they say goes to `log`.

        Args:
            second: what the second machine has in its environment.
            both: what both have there.
        """
        port, launchers = free_port(), []
        for number, folder in enumerate(self.folders):
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)),
                *("--nproc-per-node", str(each), "--master-addr", "127.0.0.1", "--master-port", str(port)),
                *("--local-addr", f"127.0.0.{number + 1}", str(STOPPING), "run", "recipe.yaml"),
                *("--output", "output", *more),
            ]
            own = ENVIRONMENT | both | ((second or {}) if number else {})
            with (folder / "log").open("wb") as log:
                launchers.append(
                    subprocess.Popen(
                        command, cwd=folder, stdout=log, stderr=log, env=os.environ | own, start_new_session=True
                    )
                )
        return launchers

    def run(self, each: int, *more: str) -> list[int]:
        """How both end."""
        return [launcher.wait() for launcher in self.start(each, *more)]

    def said(self) -> list[list[str]]:
        """On each machine: what `quantize` itself said went wrong."""
        lines = [(folder / "log").read_text().splitlines() for folder in self.folders]
        return [[line for line in found if line.startswith("quantize: ")] for found in lines]

    def working(self) -> bool:
        """Whether a process is left on either."""
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if Path(one.cwd()) in self.folders and one.status() != psutil.STATUS_ZOMBIE:
                    return True
        return False

    def log(self) -> str:
        return "\n".join((folder / "log").read_text() for folder in self.folders)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process by itself."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = write_job(folder, **JOB)
    subprocess.run(
        [sys.executable, "-m", "quantizers", "run", str(recipe), "--output", str(folder / "output")],
        check=True, capture_output=True, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    return folder / "output"


def test_two_machines_give_the_bytes_of_one_process(tmp_path: Path, whole: Path) -> None:
    """With states in files, since memory is what one machine's processes share anyway. The second keeps nothing."""
    machines = Machines(tmp_path)
    assert machines.run(2, "--states", "files") == [0, 0], machines.log()
    assert_same(machines.folders[0] / "output", whole)
    assert not (machines.folders[1] / "output").exists()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_is_lost(lost: int, tmp_path: Path, whole: Path) -> None:
    """Its launcher is killed: the processes of both end, with one line on the machine that is left. Then it goes on."""
    machines = Machines(tmp_path)
    launchers = machines.start(1, HALTED_RANK="1")
    wait_for_a_layer(machines.folders[0] / "output", launchers)
    launchers[lost].send_signal(signal.SIGKILL)
    assert launchers[1 - lost].wait() == 1
    launchers[lost].wait()
    (line,) = machines.said()[1 - lost]
    assert "gone" in line
    assert "the same command again" in line
    assert f"on {socket.gethostname()}" in line
    while machines.working():
        time.sleep(0.1)
    assert machines.run(1) == [0, 0], machines.log()
    assert_same(machines.folders[0] / "output", whole)


def wait_for_a_layer(output: Path, launchers: list[subprocess.Popen[bytes]]) -> None:
    """Return when the first layer is in the journal."""
    while not journal.layer_file(journal.work_folder(output), 0).exists():
        assert all(launcher.poll() is None for launcher in launchers)
        time.sleep(0.02)


def test_a_source_that_differs(tmp_path: Path) -> None:
    """One bit of one tensor: named, with the machine that has it."""
    machines = Machines(tmp_path)
    shard = sorted((machines.folders[1] / "model").glob("*.safetensors"))[-1]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    assert 0 not in machines.run(1)
    for lines in machines.said():
        (line,) = lines
        assert "rank 1 of 2" in line
        assert "copy the source" in line


@pytest.mark.parametrize(
    ("threads", "recipe", "line"),
    [
        ("2", ("", ""), "has machine.threads 2, but rank 0 has 1; set OMP_NUM_THREADS=1 for all"),
        ("1", ("experts: {}", "experts: {routed_weight: 0.5}"), "start the same command with the same recipe"),
    ],
)
def test_a_process_that_differs(threads: str, recipe: tuple[str, str], line: str, tmp_path: Path) -> None:
    """Refused by name before anything is written, on both machines."""
    machines = Machines(tmp_path)
    own = machines.folders[1] / "recipe.yaml"
    assert recipe[0] in own.read_text()
    own.write_text(own.read_text().replace(*recipe))
    ended = [launcher.wait() for launcher in machines.start(1, second={"OMP_NUM_THREADS": threads})]
    assert ended == [1, 1]  # which is the launchers' own; the processes end with 2
    for lines in machines.said():
        (said,) = lines
        assert said.startswith("quantize: rank 1 of 2 on ")
        assert line in said
    assert not list(tmp_path.rglob("layers"))


def test_a_launcher_starts_them_again(tmp_path: Path, whole: Path) -> None:
    """Two processes of one launcher, of which one is killed in the middle; --max-restarts does the rest."""
    recipe = write_job(tmp_path, **JOB)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
        *(str(STOPPING), "run", str(recipe), "--output", str(tmp_path / "output")),
    ]
    own = ENVIRONMENT | {"KILLED_RANK": "1", "KILLED_ATTEMPT": "0"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 on " in done.stderr
    assert_same(tmp_path / "output", whole)
