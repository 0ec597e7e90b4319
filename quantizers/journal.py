"""What is done, and under which settings: the folder DIR/.quantize/ of an unfinished run.

    run.json          the fingerprint: every setting that decides bytes
    layers/00003.json layer 3 is done: hash of its shard, its numbers
    states-00004.bin  hidden states entering layer 4
    output/           the checkpoint as far as it is assembled
    moving            everything is verified and is being moved into place
    lock              held while a process works here

A layer counts as done when its file exists; that file is written last, after the shard and the next
states are on disk. A run that dies anywhere loses at most the layer it was in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .atomic import write_json
from .errors import OutputError

WORK = ".quantize"


def work_folder(output: Path) -> Path:
    """The folder of an unfinished run."""
    return output / WORK


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the output folder alone. The kernel releases the lock of a process that died.

    Raises:
        OutputError: another process works here.
    """
    work = work_folder(output)
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip() or "another process"
            raise OutputError(f"{output}: {owner} is working here; wait for it, or choose another --output") from None
        stream.truncate(0)
        stream.write(f"process {os.getpid()}")
        stream.flush()
        yield


def refuse_changes(work: Path, fingerprint: dict[str, Any], output: Path) -> None:
    """Write the fingerprint of a new run, or compare it with that of the run to continue.

    Raises:
        OutputError: something that decides bytes differs; named with old and new value.
    """
    path = work / "run.json"
    if not path.exists():
        write_json(path, fingerprint)
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        raise OutputError(f"{path}: cannot be read; start over with --fresh") from None
    for key, before, now in _differences(old, json.loads(json.dumps(fingerprint))):
        raise OutputError(
            f"{output}: holds an unfinished run with another {key} ({_short(before)}, now {_short(now)}); "
            "restore it, or start over with --fresh"
        )


def _differences(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf that differs, with its dotted place."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif old != new:
        yield place, old, new


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


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


def discard(output: Path) -> None:
    """Remove an unfinished or finished run of ours, and nothing else.

    Raises:
        OutputError: a finished output's index cannot be read, so it is unclear what is ours.
    """
    work = work_folder(output)
    if work.exists():
        shutil.rmtree(work)
    report = output / "report.json"
    if report.exists():
        try:
            files = json.loads(report.read_text())["files"]
        except (ValueError, KeyError):
            raise OutputError(f"{report}: cannot be read; empty {output} by hand") from None
        for name in [*files, "report.json"]:
            if Path(name).name == name:
                (output / name).unlink(missing_ok=True)
