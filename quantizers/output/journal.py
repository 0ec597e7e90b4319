"""What is done, and under which settings: the folder DIR/.quantize/ of an unfinished run.

    run.json          the fingerprint: every setting that decides bytes
    source.json       SHA-256 of the source's shards, with --paranoid
    schemes/          what was measured for a budget, see measure_schemes.py
    choice.json       the schemes that were chosen within it
    layers/00003.json layer 3 is done: digest of its shard as it was written, its numbers
    states-00004.bin  hidden states entering layer 4
    output/           the checkpoint as far as it is assembled
    run.log           a line of numbers for each layer
    moving            everything is verified and is being moved into place
    lock              held while a process works here
    ranks/            what several processes hand each other

A layer counts as done when its file exists; that file is written last, after the shard and the next
states are on disk. A run that dies anywhere loses at most the layer it was in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizers.system.atomic import disk_errors, write_json
from quantizers.system.errors import OutputError
from quantizers.system.own_files import file_sha256
from quantizers.team.ranks import ALONE, Ranks

WORK = ".quantize"


def work_folder(output: Path) -> Path:
    """The folder of an unfinished run."""
    return output / WORK


def unfinished(output: Path) -> bool:
    """Whether a run has begun here and not ended. An empty work folder is what a kill at the very end leaves."""
    work = work_folder(output)
    return (work / "run.json").exists() or (work / "moving").exists()


def refuse_second_run(output: Path) -> None:
    """`locked`, for a moment: what takes seconds to import need not be imported to say that the folder is in use.

    Raises:
        OutputError: another process works here.
    """
    if (work_folder(output) / "lock").exists():
        with locked(output):
            pass


@contextlib.contextmanager
def locked(output: Path, ranks: Ranks = ALONE) -> Iterator[None]:
    """Hold the output folder alone. The kernel releases the lock of a process that died.

    Of several processes that work on one run, rank 0 takes the lock first. Then all of them hold it, so
    that nobody else can have it before the last has ended.

    Raises:
        OutputError: another process works here.
    """
    work = work_folder(output)
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        stream = (work / "lock").open("a+")
    with stream:
        try:
            if ranks.leads:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ranks.several:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip() or "another process"
            raise OutputError(f"{output}: {owner} is working here; wait for it, or choose another --output") from None
        if ranks.leads:
            with disk_errors(work):
                stream.truncate(0)
                stream.write(f"process {os.getpid()}")
                stream.flush()
        yield


def refuse_changes(work: Path, fingerprint: dict[str, Any], output: Path, name: str = "run.json") -> None:
    """Write the fingerprint of a new run, or compare it with that of the run to continue.

    Args:
        name: of its file.

    Raises:
        OutputError: something that decides bytes differs; named with old and new value.
    """
    path = work / name
    if not path.exists():
        write_json(path, fingerprint)
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        raise OutputError(f"{path}: cannot be read; start over with --fresh") from None
    found = list(differences(old, json.loads(json.dumps(fingerprint))))
    # On another device other things count, so that it differs comes before what follows from it.
    for key, before, now in sorted(found, key=lambda difference: not difference[0].endswith(".device")):
        raise OutputError(
            f"{output}: holds an unfinished run with another {key} ({_short(before)}, now {_short(now)}); "
            "restore it, or start over with --fresh"
        )


def begun_with(work: Path, name: str = "run.json") -> dict[str, Any]:
    """The machine's part of the fingerprint of what is to be continued; empty where nothing was begun.

    Args:
        name: of the fingerprint's file.
    """
    try:
        machine = json.loads((work / name).read_text())["machine"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return machine if isinstance(machine, dict) else {}


def differences(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf that differs, with its dotted place."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif old != new:
        yield place, old, new


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def remove_cut_files(work: Path) -> None:
    """Remove what a kill in the middle of a write has left: our temporary files, and safetensors' own (`.tmp…`)."""
    for path in work.rglob("*"):
        if path.suffix == ".tmp" or path.name.startswith(".tmp"):
            path.unlink()


def layer_file(work: Path, layer: int) -> Path:
    """The journal entry of a layer."""
    return work / "layers" / f"{layer:05d}.json"


def done_layers(work: Path, layers: int) -> list[dict[str, Any]]:
    """The journal entries of the layers done so far, in order."""
    entries = []
    for layer in range(layers):
        path = layer_file(work, layer)
        if not path.exists():
            break
        entries.append(json.loads(path.read_text()))
    return entries


def refuse_damaged_shards(work: Path, layers: int, output: Path, hashes: bool) -> None:
    """Refuse to go on from shards that are not as they were written.

    Args:
        hashes: compare their SHA-256 too (the proof does so in any case, at the end).

    Raises:
        OutputError: a finished shard is gone, or has another size or other bytes.
    """
    for entry in done_layers(work, layers):
        path, written = work / "output" / entry["shard"], entry["digest"]
        try:
            size = path.stat().st_size
            wrong = f"has {size:,} bytes, {written['bytes']:,} were written" if size != written["bytes"] else ""
            if not wrong and hashes and file_sha256(path) != written["sha256"]:
                wrong = f"has other bytes than were written (SHA-256 {written['sha256'][:16]}…)"
        except OSError as failure:
            wrong = f"cannot be read ({failure.strerror})"
        if wrong:
            raise OutputError(
                f"{output}: the finished shard of layer {entry['layer']}, {path.name}, {wrong}; restore it, or start "
                "over with --fresh"
            )


def log(work: Path, line: str) -> None:
    """Add a line, with the time, to the log of the run."""
    path = work / "run.log"
    with disk_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")


def discard(output: Path) -> None:
    """Remove an unfinished or finished run of ours, and nothing else.

    Raises:
        OutputError: another process works here, or a finished output's report cannot be read, so that it is
            unclear what is ours.
    """
    work = work_folder(output)
    if work.exists():
        with locked(output):
            remove(work)
    report = output / "report.json"
    if report.exists():
        try:
            files = json.loads(report.read_text())["files"]
        except (ValueError, KeyError):
            raise OutputError(f"{report}: cannot be read; empty {output} by hand") from None
        for name in [*files, "report.json"]:
            if Path(name).name == name:
                (output / name).unlink(missing_ok=True)


def remove(work: Path) -> None:
    """Remove the work folder: what is done first, what the folder is last, so that a kill half-way misleads nobody."""
    shutil.rmtree(work / "layers", ignore_errors=True)
    last = ("run.json", "moving", "lock")
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in last:
            path.unlink()
    for name in last:
        (work / name).unlink(missing_ok=True)
    work.rmdir()
