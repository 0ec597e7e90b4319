"""Whether the source is still what a run began with: size and time of its files always, hashes on request."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .atomic import write_json
from .checkpoint import Checkpoint
from .errors import CheckpointError, OutputError
from .progress import progress


def shard_files(source: Checkpoint) -> list[Path]:
    """The files that hold its tensors."""
    return sorted({info.file for info in source.tensors.values()})


def source_stats(source: Checkpoint) -> dict[str, Any]:
    """Size and time of last change (nanoseconds) of each shard."""
    stats: dict[str, Any] = {}
    for file in shard_files(source):
        try:
            stat = file.stat()
        except OSError as failure:
            raise CheckpointError(f"{file}: cannot be read ({failure.strerror}); check the folder") from None
        stats[file.name] = {"bytes": stat.st_size, "changed": stat.st_mtime_ns}
    return stats


def check_hashes(source: Checkpoint, work: Path, output: Path, check: Callable[[], None]) -> None:
    """Hash every shard; keep the hashes at first, compare them with those kept when the run goes on.

    Raises:
        OutputError: a shard's bytes are not those that the run began with.
    """
    kept = work / "source.json"
    hashes = {}
    files = shard_files(source)
    with progress("hashing", len(files), unit="shard") as step:
        for file in files:
            check()
            try:
                with file.open("rb") as stream:
                    hashes[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as failure:
                raise CheckpointError(f"{file}: cannot be read ({failure.strerror}); check the folder") from None
            step(file.name)
    if not kept.exists():
        if any((work / "layers").glob("*.json")):
            print(
                f"{output}: the layers done so far were made without --paranoid; hashes are kept from now on",
                file=sys.stderr,
            )
        write_json(kept, hashes)
        return
    for name, before in json.loads(kept.read_text()).items():
        if hashes.get(name) != before:
            raise OutputError(
                f"{output}: the source's {name} has other bytes than when this run began (SHA-256 {before[:16]}…, now "
                f"{hashes.get(name, 'gone')[:16]}…); restore it, or start over with --fresh"
            )
