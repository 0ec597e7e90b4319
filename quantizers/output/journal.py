"""The journal: the state of an unfinished run, in the folder DIR/.quantize/.

    run.json          the fingerprint: every setting that decides bytes
    begun.json        the command that began it, and how many layers it has
    source.json       SHA-256 of the source's shards, with --paranoid
    schemes/          the measurements for a budget, see budget/measure.py
    choice.json       the schemes chosen within the budget
    layers/00003.json layer 3 is done: the digest of its shard, and its figures
    outside.json      the same of the shard that holds what lies outside the layers
    held-out.json     the held-out set that the layers are measured on
    held-out/         hidden states of the held-out texts after the last finished layer: the source's and the output's
    states.bin        calibration states between two layers, and x.bin, chosen.bin, weight.bin: where they do not
                      fit in memory; nobody reads them again after the process has ended
    output/           the checkpoint, as far as it is written
    run.log           one line of figures for each layer
    moving            everything is verified, and the final move has started
    lock              held while a process works here

A layer is done when its JSON file exists. That file is written last, after the shard and the held-out states are on
disk, so a run that dies loses at most the layer that it was working on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from quantizers.system.errors import OutputError
from quantizers.system.files import disk_errors, file_sha256, write_json
from quantizers.system.thread_map import thread_map
from quantizers.team.team import ALONE, Team

WORK = ".quantize"
HELD_OUT = "held-out.json"
BEGUN = "begun.json"


def work_folder(output: Path, node: int = 0) -> Path:
    """The folder of an unfinished run; of another machine than the first, which may see the same disk, one inside."""
    return output / WORK / f"node-{node}" if node else output / WORK


def unfinished(output: Path) -> bool:
    """Whether an unfinished run is here. The empty work folder that a kill at the very end leaves does not count."""
    work = work_folder(output)
    return (work / "run.json").exists() or (work / "moving").exists()


def note_command(work: Path, words: Sequence[str], layers: int) -> None:
    """Keep the command that goes on with this run: what was typed, without what discards it.

    Args:
        words: from `quantize` on; empty if it was called in another way.
    """
    kept = [word for word in words if word not in ("--fresh", "--yes")]
    write_json(work / BEGUN, {"words": kept, "folder": str(Path.cwd()), "layers": layers})


def refuse_unfinished(folder: Path) -> None:
    """Refuse a folder whose run was cut off, for all that needs a finished checkpoint.

    Raises:
        OutputError: it is unfinished; the message has the command that finishes it.
    """
    if not unfinished(folder):
        return
    work = work_folder(folder)
    try:
        begun = json.loads((work / BEGUN).read_text())
        layers, words, place = int(begun["layers"]), list(begun["words"]), begun["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        raise OutputError(f"{folder}: unfinished; give the command that began it again, which goes on") from None
    done = sum(layer_file(work, layer).exists() for layer in range(layers))
    command = f": `{shlex.join(words)}`" if words else " that began it"
    where = "" if place == str(Path.cwd()) or not words else f", in {place}"
    raise OutputError(
        f"{folder}: unfinished, {done} of {layers} layers are done; finish it with the same command{command}{where}"
    )


def refuse_second_run(output: Path) -> None:
    """Take and release the lock: fails early, before imports that take seconds, if the folder is in use.

    Raises:
        OutputError: another process works here.
    """
    if (work_folder(output) / "lock").exists():
        with locked(output):
            pass


@contextlib.contextmanager
def locked(output: Path, team: Team = ALONE) -> Iterator[None]:
    """Lock the output folder for this run. The kernel releases the lock of a process that dies.

    Of several processes of a machine the first one takes an exclusive lock; then all hold a shared lock, so that no
    other run gets the lock before the last of them has ended.

    Raises:
        OutputError: another process works here.
    """
    work, here = work_folder(output, team.node), team.here
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        stream = (work / "lock").open("a+")
    with stream:
        if not here.leads:
            here.barrier()  # the first one has locked it, or has failed
        try:
            if here.leads:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if here.several:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip() or "another process"
            raise OutputError(f"{output}: {owner} is working here; wait for it, or choose another --output") from None
        if here.leads:
            with disk_errors(work):
                stream.truncate(0)
                stream.write(f"process {os.getpid()}")
                stream.flush()
            here.barrier()
        yield


def remove_cut_files(work: Path) -> None:
    """Remove the temporary files of interrupted writes: ours (`….tmp`) and those of safetensors (`.tmp…`)."""
    for path in work.rglob("*"):
        if path.suffix == ".tmp" or path.name.startswith(".tmp"):
            path.unlink()


def layer_file(work: Path, layer: int) -> Path:
    """The path of a layer's journal entry."""
    return work / "layers" / f"{layer:05d}.json"


def kept_file(work: Path, part: int | None) -> Path:
    """The path of the entry of a shard that is kept as a whole: None for the tensors outside the layers."""
    return work / ("outside.json" if part is None else f"kept-{part:05d}.json")


def kept_files(work: Path) -> list[Path]:
    """Those of them that are there."""
    return [path for path in work.glob("*.json") if path.name == "outside.json" or path.name.startswith("kept-")]


def done_layers(work: Path, layers: int) -> list[dict[str, Any]]:
    """The journal entries of all layers done so far, in order."""
    entries = []
    for layer in range(layers):
        path = layer_file(work, layer)
        if not path.exists():
            break
        entries.append(json.loads(path.read_text()))
    return entries


def damaged_shards(
    work: Path, entries: Sequence[dict[str, Any]], step: Callable[[str], None] = lambda _: None
) -> dict[int, str]:
    """The finished shards that are not as they were written, by their place in `entries`, and what is wrong with each.

    Args:
        entries: of the journal, with `shard` and `digest`. Every shard is read.
        step: called after each.
    """
    damaged = {}
    with contextlib.closing(thread_map(partial(_damage, work / "output"), entries)) as found:
        for place, problem in enumerate(found):
            if problem:
                damaged[place] = problem
            step(entries[place]["shard"])
    return damaged


def _damage(folder: Path, entry: dict[str, Any]) -> str:
    """What is wrong with a finished shard; empty if nothing is."""
    path, written = folder / entry["shard"], entry["digest"]
    try:
        size = path.stat().st_size
        if size != written["bytes"]:
            return f"{path.name} has {size:,} bytes, {written['bytes']:,} were written"
        return "" if file_sha256(path) == written["sha256"] else f"{path.name} has other bytes than were written"
    except OSError as failure:
        return f"{path.name} cannot be read ({failure.strerror})"


def log(work: Path, line: str) -> None:
    """Append a line with the current time to run.log."""
    path = work / "run.log"
    with disk_errors(path), path.open("a", encoding="utf-8") as stream:
        stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")


def discard(output: Path) -> None:
    """Remove the files of an unfinished or finished run, and no other files.

    Raises:
        OutputError: another process works here, or report.json cannot be read, which lists the run's files.
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
    """Remove the work folder: finished layers first, the files that mark it as a run last.

    A kill half-way then never leaves layers without the fingerprint that they belong to.
    """
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


def leave(output: Path, node: int) -> None:
    """Remove what a machine other than the first had here, and the folders around it if they hold nothing else."""
    work = work_folder(output, node)
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):
        work.parent.rmdir()
        output.rmdir()
