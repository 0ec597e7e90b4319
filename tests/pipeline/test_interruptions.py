"""Runs that are cut off by a signal, a full disk or a vanished source: they go on, to the same bytes."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command
from conftest import REPOSITORY
from runs import Small, assert_same, cut_in_layer, hashes
from tiny import write_job

from quantizers.output import journal
from quantizers.pipeline import pipeline, quantizer
from quantizers.pipeline.options import Options

MARGIN = 2**19  # for report.json, card, pictures and journal of a small job


KILLS = 3

# `quantize` in a process that says at its end which of the slow imports it made.
NAMES_IMPORTS = """
import atexit, sys
slow = {"torch", "transformers", "datasets", "matplotlib", "llmcompressor"}
atexit.register(lambda: print("heavy:", sorted(slow & set(sys.modules))))
from quantizers.cli.main import main
main()
"""


@pytest.mark.parametrize(
    ("name", "code"),
    [pytest.param("SIGKILL", -9, marks=pytest.mark.slow), pytest.param("SIGTERM", 143, marks=pytest.mark.every)],
)
def test_killed_at_random_moments(name: str, code: int, tmp_path: Path) -> None:
    """At seeded moments spread over the whole run; each output is the unbroken run's, byte for byte."""
    recipe = write_job(tmp_path, layers=2, words=12, samples=2, awq={"grid": 5})
    script = REPOSITORY / "tests" / "forked_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), str(recipe), str(tmp_path), name, str(KILLS), "20"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(f"{name}: {result}")
    assert result["ended"] == [code] * KILLS
    assert result["last"] == 0
    assert len(result["outputs"]) > 1  # killed when it was young and when it was nearly done
    for output in result["outputs"]:
        assert_same(tmp_path / output, tmp_path / "whole")
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "Traceback" not in logs
    stopped = len(re.findall(r"^quantize: interrupted by SIGTERM; give the same command again", logs, re.M))
    assert stopped == (KILLS if name == "SIGTERM" else 0)


@pytest.fixture
def quantize(command: Command) -> Callable[..., tuple[int, str]]:
    """`quantize(*arguments)`: exit code and standard error of the command in this process."""

    def call(*arguments: object) -> tuple[int, str]:
        code = command(*arguments, "--device", "cpu")
        gc.collect()  # the exception's frames hold maps of the states, and those their blocks on the disk
        return code, command.err

    return call


def is_full(code: int, errors: str) -> None:
    """Exit 1, and one line of ours beside those that a run says anyway."""
    # Progress, and the line with which a run begins.
    others = r"(quantizing|checking|resuming|verifying|evaluating|scoring|last reading): |forecast |.* → "
    ours = [line for line in errors.splitlines() if not re.match(others, line)]
    assert code == 1, errors
    assert len(ours) == 1, errors
    assert ours[0].startswith("quantize: ")
    assert "make room" in ours[0]


def mounted(place: Path, size: int, *options: str) -> str | None:
    """Why a file system of `size` bytes cannot be mounted there, None where it was."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no mount command"
    return done.stderr.strip() or "mount failed" if done.returncode else None


@pytest.mark.slow
def test_a_disk_that_fills_while_the_run_works(
    small: Small, tmp_path: Path, quantize: Callable[..., tuple[int, str]]
) -> None:
    """A file system of a share of what is needed, that grows, without the look at it before the start; then with it.

    At last it is read-only.
    """
    place = tmp_path / "disk"

    def share(part: float) -> int:
        return int(small.needed * part) // 4096 * 4096

    if problem := mounted(place, share(0.01)):  # for root alone; test_writes_that_find_no_room needs none
        pytest.skip(f"no small file system can be mounted here: {problem}")
    command = ("run", small.recipe, "--output", place / "output")
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pipeline.journal, "check_room", lambda *_: None)
            for part in (0.01, 0.3, 0.3, 0.9):  # and again on the full disk
                assert mounted(place, share(part), "remount") is None
                is_full(*quantize(*command))
                assert not (place / "output" / "config.json").exists()
        code, errors = quantize(*command)  # now it is looked at; there is room for the lock
        is_full(code, errors)
        assert re.search(r"needs [\d.e-]+ GB more, [\d.e-]+ GB are free", errors)
        assert mounted(place, small.needed + MARGIN, "remount") is None
        code, errors = quantize(*command)
        assert code == 0, errors
        assert_same(place / "output", small.whole)
        assert mounted(place, small.needed + MARGIN, "remount", "ro") is None
        code, errors = quantize("run", small.recipe, "--output", place / "other")
        assert code == 2
        assert "cannot be written (Read-only file system); choose another folder" in errors
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.slow
def test_writes_that_find_no_room(small: Small, tmp_path: Path, quantize: Callable[..., tuple[int, str]]) -> None:
    """Where nothing can be mounted: the second of one kind of write says that the disk is full, then of another."""
    command = ("run", small.recipe, "--output", tmp_path / "output")
    for name in ("os.posix_fallocate", "quantizers.stitch.write.shard.save_file", "os.fsync"):
        count = iter(range(1_000_000))
        module, _, function = name.rpartition(".")
        real = getattr(sys.modules[module], function)

        def full(*arguments: Any, count: Any = count, real: Any = real, **named: Any) -> Any:
            if next(count) == 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(name, full)
            is_full(*quantize(*command))
        assert not (tmp_path / "output" / "config.json").exists()
    assert quantize(*command)[0] == 0
    assert_same(tmp_path / "output", small.whole)


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.slow
def test_a_source_that_changes_between_two_parts(
    small: Small, tmp_path: Path, quantize: Callable[..., tuple[int, str]]
) -> None:
    """It vanishes, has another time, other bytes with the old time: one run, which comes to the end after all.

    Only hashes tell of other bytes, so --paranoid keeps them; where the first part had none, it says so.
    """
    job = small.copied(tmp_path / "job")  # whose source may be spoiled
    shard, away, output = job.model / SHARD, tmp_path / "away", tmp_path / "output"
    cut_in_layer(1, job.job, Options(output, torch.device("cpu")))
    command = ("run", job.recipe, "--output", output, "--paranoid")
    real = quantizer.solve_layer

    def vanish(*arguments: Any, **named: Any) -> Any:
        if shard.exists():
            shard.rename(away)
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quantizer, "solve_layer", vanish)
        code, errors = quantize(*command)
    assert code == 2, errors
    assert SHARD in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert "hashes are kept from now on" in errors
    away.rename(shard)
    stat, raw = shard.stat(), shard.read_bytes()
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    code, errors = quantize(*command)
    assert code == 2
    assert f"source.{SHARD}.changed ({stat.st_mtime_ns}, now {stat.st_mtime_ns + 1})" in errors
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code, errors = quantize(*command)
    assert code == 2
    assert f"the source's {SHARD} has other bytes than when this run began" in errors
    shard.write_bytes(raw)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert quantize(*command)[0] == 0
    assert_same(output, small.whole)


def test_states_that_vanished_are_not_taken_for_zeros(
    small: Small, cut: Path, tmp_path: Path, quantize: Callable[..., tuple[int, str]]
) -> None:
    output = shutil.copytree(cut, tmp_path / "output")
    (output / journal.WORK / "held-out" / "states-0-00002.bin").unlink()
    code, errors = quantize("run", small.recipe, "--output", output)
    assert code == 1
    assert "states-0-00002.bin: is missing, so the run cannot be resumed" in errors


def test_a_kill_while_the_traces_are_removed(
    small: Small, tmp_path: Path, quantize: Callable[..., tuple[int, str]]
) -> None:
    """The empty work folder beside a finished output is no unfinished run, and goes away."""
    output = shutil.copytree(small.whole, tmp_path / "output")
    work = journal.work_folder(output)
    work.mkdir()
    (work / "lock").touch()
    assert quantize("run", small.recipe, "--output", output)[0] == 0
    assert hashes(output) == hashes(small.whole)
    assert not work.exists()


def test_the_second_run_on_a_folder_is_refused_before_anything_heavy_is_imported(small: Small, cut: Path) -> None:
    """So within a second on a quiet machine; --fresh does not remove what another process works on."""
    with journal.locked(cut):
        before = {path: path.stat().st_mtime_ns for path in sorted(cut.rglob("*"))}
        for flags in ([], ["--fresh", "--yes"]):
            done = subprocess.run(
                [sys.executable, "-c", NAMES_IMPORTS, "run", str(small.recipe), "--output", str(cut), *flags],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 2, done.stderr
            assert f"process {os.getpid()} is working here" in done.stderr
            assert done.stdout == "heavy: []\n"
        assert before == {path: path.stat().st_mtime_ns for path in sorted(cut.rglob("*"))}
