"""The output folder of a run: what may resume, the journal while it is unfinished, and the final move.

The state of an unfinished run is in the folder DIR/.quantize/:

    run.json          the fingerprint: every setting that decides bytes
    command.txt       the command that resumes it
    calibration/      the sets as they were loaded: a run that resumes does not ask for them again
    source.json       SHA-256 of the source's shards, with --paranoid
    schemes/          the measurements for a budget, see budget/measure.py
    choice.json       the schemes chosen within the budget
    layers/00003.json layer 3 is done: the digest of its shard, and its figures
    passthrough-*     the same of each shard of tensors that pass through
    held-out.json     the held-out set that the layers are measured on
    held-out/         hidden states of the held-out texts after the last finished layer: the source's and the output's
    states.bin        calibration states between two layers, and x.bin, chosen.bin, weight.bin: where they do not
                      fit in memory; not read again after the process has ended
    imatrix/          with --imatrix: of each layer the sums over the source's activations, and states as states.bin
    output/           the checkpoint, as far as it is written
    source/           with --stream: the shards that are fetched, see checkpoint/window.py
    uploaded.json     with --publish-as-you-go: what is on the Hub, see output/uploads.py
    moving            everything is verified, and the final move has started
    lock              locked while a process works here

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
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from quantizers.checkpoint.reader import CONFIG, INDEX
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import OutputError, QuantizeError
from quantizers.system.files import disk_errors, file_sha256, nearest_existing, sync_folder, write_json, write_text
from quantizers.system.keys import Part, key
from quantizers.system.output_files import CARD, REPORT, is_within
from quantizers.system.thread_map import thread_map

WORK = ".quantize"
FINGERPRINT = "run.json"
UPLOADED = "uploaded.json"
HELD_OUT = "held-out.json"
COMMAND = "command.txt"
LIBRARIES = ("torch", "transformers")  # of the fingerprint's part `machine`
FRESH = "start over with --fresh"
MISSING = object()  # in place of a value, for `differences` of what is nowhere null
MOVED_LAST = (REPORT, CARD, INDEX, CONFIG)  # moved last, because these files mark a folder as finished


class ShardDigest(Part):
    """One written shard."""

    bytes: int = key("Its size", "bytes")
    sha256: str = key("SHA-256 of the file, hexadecimal")
    tensors: str = key("Checksums of its tensors, 8 bytes each, in the order of the file, hexadecimal")


class Shard(NamedTuple):
    """A finished shard of a run, by its journal entry."""

    name: str
    digest: ShardDigest


def work_folder(output: Path, node: int = 0) -> Path:
    """The folder of an unfinished run; for another machine than the first, which may see the same disk, one inside."""
    return output / WORK / f"node-{node}" if node else output / WORK


def unfinished(output: Path) -> bool:
    """Whether an unfinished run is here. The empty work folder that a kill at the very end leaves does not count."""
    work = work_folder(output)
    return (work / FINGERPRINT).exists() or (work / "moving").exists()


def note_command(work: Path, words: Sequence[str]) -> None:
    """Write down the command that resumes this run: the words from `quantize` on, but those that discard it."""
    if resuming := [word for word in words if word not in ("--fresh", "--yes")]:
        write_text(f"`{shlex.join(resuming)}`, in {Path.cwd()}", work / COMMAND)


def refuse_unfinished(folder: Path) -> None:
    """Raise an OutputError with the command that finishes it if a folder is that of an interrupted run."""
    if unfinished(folder):
        try:
            command = (work_folder(folder) / COMMAND).read_text(encoding="utf-8", errors="replace")
        except OSError:
            command = "the one that began it"
        raise OutputError(folder, "unfinished", f"finish it with the same command: {command}")


def refuse_second_run(output: Path) -> None:
    """Take and release the lock: `locked` fails early, before imports that take seconds, if the folder is in use."""
    if (work_folder(output) / "lock").exists():
        with locked(output):
            pass


@contextlib.contextmanager
def locked(output: Path, dist: ProcessGroup = SINGLE_PROCESS) -> Iterator[None]:
    """Lock the output folder for this run. The kernel releases the lock of a process that dies.

    Local rank 0 of each machine takes an exclusive lock; then its processes hold a shared lock, so that no other run
    gets the lock before the last of them has ended. An OutputError says that another process works here.
    """
    work, takes = work_folder(output, dist.node), dist.local_rank == 0
    with disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        stream = (work / "lock").open("a+b", buffering=0)  # whose `close` has nothing left to write
    with stream:
        if not takes:
            dist.barrier()  # local rank 0 has locked it, or has failed
        try:
            if takes:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if dist.local_world_size > 1:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().decode(errors="replace").strip() or "another process"
            raise OutputError(output, f"{owner} is working here", "wait for it, or choose another --output") from None
        if takes:
            with disk_errors(work):
                stream.truncate(0)
                stream.write(f"process {os.getpid()}".encode())
            dist.barrier()
        yield


def remove_cut_files(work: Path) -> None:
    """Remove the temporary files of interrupted writes: ours (`….tmp`) and those of safetensors (`.tmp…`)."""
    for path in work.rglob("*"):
        if path.suffix == ".tmp" or path.name.startswith(".tmp"):
            path.unlink()


def layer_file(work: Path, layer: int) -> Path:
    """The path of a layer's journal entry."""
    return work / "layers" / f"{layer:05d}.json"


def passthrough_file(work: Path, part: int | None) -> Path:
    """The path of the journal entry of a passthrough shard: None for the tensors outside the layers."""
    return work / f"passthrough-{'outside' if part is None else f'{part:05d}'}.json"


def done_layers(work: Path, layers: int) -> list[dict[str, Any]]:
    """The journal entries of all layers done so far, in order."""
    done = takewhile(Path.exists, (layer_file(work, layer) for layer in range(layers)))
    return [json.loads(file.read_text()) for file in done]


def shard_of(entry: Mapping[str, Any]) -> Shard:
    """The shard of a journal entry."""
    return Shard(entry["shard"], ShardDigest.model_validate(entry["digest"]))


def passthrough_entries(work: Path) -> list[dict[str, Any]]:
    """The journal entries of all passthrough shards written so far."""
    return [json.loads(file.read_text()) for file in sorted(work.glob("passthrough-*.json"))]


def done_shards(work: Path, layers: int) -> list[Shard]:
    """The shards of all layers done so far, in order."""
    return [shard_of(entry) for entry in done_layers(work, layers)]


def passthrough_shards(work: Path) -> list[Shard]:
    """The passthrough shards written so far."""
    return [shard_of(entry) for entry in passthrough_entries(work)]


def uploads(work: Path) -> dict[str, Any]:
    """Load the state of a run that publishes as it goes, see output/uploads.py; empty if it does not."""
    file = work / UPLOADED
    return json.loads(file.read_text()) if file.exists() else {}


def digests(work: Path) -> dict[str, ShardDigest]:
    """Load the digest of each finished shard of a run, by the shard's name."""
    layers = [json.loads(file.read_text()) for file in (work / "layers").glob("*.json")]
    return {shard.name: shard.digest for shard in map(shard_of, (*layers, *passthrough_entries(work)))}


def damaged_shards(
    work: Path,
    shards: Sequence[Shard],
    step: Callable[[str], None] = lambda _: None,
    uploaded: Container[str] = (),
) -> dict[int, str]:
    """The problem of each damaged one of some finished shards, by its index.

    Every shard is read, but for those that are not here, and `uploaded`: their hashes have been compared.
    """

    def problem_of(shard: Shard) -> str:
        path, written = work / "output" / shard.name, shard.digest
        if path.name in uploaded and not path.exists():
            return ""
        try:
            size = path.stat().st_size
            if size != written.bytes:
                return f"{path.name} has {size:,} bytes, {written.bytes:,} were written"
            return "" if file_sha256(path) == written.sha256 else f"{path.name} has other bytes than were written"
        except OSError as failure:
            return f"{path.name} cannot be read ({failure.strerror})"

    damaged = {}
    with contextlib.closing(thread_map(problem_of, shards)) as problems:
        for index, problem in enumerate(problems):
            if problem:
                damaged[index] = problem
            step(shards[index].name)
    return damaged


def discard(output: Path) -> None:
    """Remove the files of an unfinished or finished run, and no other files.

    Raises:
        OutputError: another process works here, or report.json cannot be read, which lists the run's files.
    """
    if work_folder(output).exists():
        with locked(output):
            remove(work_folder(output))
    report = output / REPORT
    if not report.exists():
        return
    try:
        files = json.loads(report.read_text())["files"]
    except (ValueError, KeyError):
        raise OutputError(report, "cannot be read", f"empty {output} by hand") from None
    for name in filter(is_within, [*files, REPORT]):
        (output / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are left there
            for folder in PurePosixPath(name).parents[:-1]:
                (output / folder).rmdir()


def remove(work: Path) -> None:
    """Remove the work folder: finished layers first, the files that mark it as a run last.

    A kill half-way then never leaves layers without the fingerprint that they belong to.
    """
    shutil.rmtree(work / "layers", ignore_errors=True)
    last = (FINGERPRINT, "moving", "lock")
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in last:
            path.unlink()
    for name in last:
        (work / name).unlink(missing_ok=True)
    work.rmdir()


def leave(output: Path, node: int) -> None:
    """Remove the work folder of another machine than the first, and the folders around it if they are then empty."""
    work = work_folder(output, node)
    shutil.rmtree(work, ignore_errors=True)
    with contextlib.suppress(OSError):
        work.parent.rmdir()
        output.rmdir()


def refuse_changes(
    work: Path, fingerprint: dict[str, Any], output: Path, name: str = FINGERPRINT, *, anew: str = FRESH
) -> None:
    """Write the fingerprint of a new run, or compare it with that of the run to resume; `anew` is how to start over.

    Raises:
        OutputError: a setting that decides bytes differs; the message has the old and the new value.
    """
    path = work / name
    if not path.exists():
        write_json(path, fingerprint)
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        raise OutputError(path, "cannot be read", anew) from None
    changes = list(differences(old, json.loads(json.dumps(fingerprint))))
    # Report a changed device first, because other differences follow from it, and the digest of the calibration data
    # last, because it follows from others.
    changes.sort(key=lambda change: (not change[0].endswith(".device"), change[0] == "calibration"))
    for setting, before, now in changes:
        raise OutputError(
            output,
            f"holds an unfinished run with another {setting} ({short_value(before)}, now {short_value(now)})",
            f"{_remedy(setting, before)}, or {anew}",
        )


def _remedy(setting: str, before: Any) -> str:
    """The way to give a setting the value that it had when the run began."""
    if setting.startswith("commits"):
        return "give --stream, or leave it out, as before"
    remedies = {
        "machine.threads": f"set OMP_NUM_THREADS={before}",
        "machine.device": "give --device cpu" if before == "cpu" else f"resume on the device {before}",
    } | {f"machine.{name}": f"install {name} {before}" for name in LIBRARIES}
    return remedies.get(setting, "restore it") if before is not None else "restore it"


def begun_with(work: Path, name: str = FINGERPRINT, part: str = "machine") -> dict[str, Any]:
    """A part of the fingerprint of the run to resume; empty if there is none."""
    try:
        value = json.loads((work / name).read_text())[part]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def differences(old: Any, new: Any, path: str = "", missing: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of two JSON objects that differs: its dotted key, the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            before, now = old.get(name, missing), new.get(name, missing)
            yield from differences(before, now, f"{path}.{name}" if path else name, missing)
    elif type(old) is not type(new) or old != new:
        yield path, old, new


def short_value(value: Any, length: int = 60) -> str:
    """A value of a setting for a message, cut where it is longer than that."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= length else text[: length - 3] + "..."


def finished_report(output: Path) -> dict[str, Any] | None:
    """The report of a finished output; None if the output is not finished, {} if its report is not a JSON object."""
    if unfinished(output) or not (output / CONFIG).is_file():
        return None
    try:
        report: dict[str, Any] = json.loads((output / REPORT).read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else {}


def refuse_strangers(output: Path) -> None:
    """Raise an OutputError if the path is a file, or a folder with other files in it."""
    existing = nearest_existing(output)
    if not existing.is_dir():
        raise OutputError(existing, "is a file", "give a new or empty folder as --output")
    if output.is_dir() and not work_folder(output).exists() and any(output.iterdir()):
        raise OutputError(output, "is not empty and holds no run of this program", "give a new or empty folder")


def check_room(
    work: Path, needed: int, remedies: Sequence[str] = (), *, elsewhere: str = "choose another --output"
) -> None:
    """Raise a QuantizeError with both numbers if a run would fill the disk.

    Args:
        needed: bytes of the output and of all temporary files.
        remedies: what else would need less.
        elsewhere: how the user chooses another disk.
    """
    # Files of an interrupted run already have their space: count their allocated blocks, not their sizes.
    needed -= sum(512 * file.stat().st_blocks for file in work.rglob("*") if file.is_file())
    free = shutil.disk_usage(nearest_existing(work)).free
    if needed > free:
        raise QuantizeError(
            work.parent,
            f"what the run keeps on the disk needs {needed / 1e9:.3g} GB more, {free / 1e9:.3g} GB are free",
            f"make room, {elsewhere}{''.join(f', or {remedy}' for remedy in remedies)}",
        )


def move_into_place(work: Path, output: Path) -> dict[str, Any]:
    """Move the finished files, shards first, config.json last, and return the report. Continues an interrupted move."""
    folder = work / "output"
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    names.sort(key=lambda name: (name in MOVED_LAST and 1 + MOVED_LAST.index(name), not name.endswith(".safetensors")))
    with disk_errors(output):
        for name in names:
            os.replace(folder / name, output / name)
        sync_folder(output)
    report: dict[str, Any] = json.loads((output / REPORT).read_text())
    remove(work)
    return report
