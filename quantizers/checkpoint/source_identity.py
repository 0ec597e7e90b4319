"""Identity of the source when a run resumes: size and time of its files, a sampled digest, or hashes on request."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantizers.system.errors import OutputError
from quantizers.system.files import file_sha256, write_json
from quantizers.system.progress import progress

from .reader import Checkpoint
from .safetensors_header import read_errors

SPOTS, PIECE = 32, 4096  # number and bytes of the pieces of each shard that `source_digest` covers


def shard_files(source: Checkpoint) -> list[Path]:
    """The files that contain its tensors."""
    return sorted({info.file for info in source.tensors.values()})


def source_stats(source: Checkpoint) -> dict[str, Any]:
    """Size and modification time (in nanoseconds) of each shard."""
    stats: dict[str, Any] = {}
    for file in shard_files(source):
        with read_errors(file):
            stat = file.stat()
        stats[file.name] = {"bytes": stat.st_size, "changed": stat.st_mtime_ns}
    return stats


def source_digest(source: Checkpoint) -> str:
    """SHA-256, hexadecimal, that identifies a source in any folder, without reading all of it.

    It covers config.json, every tensor's name, dtype and shape, and of each shard the size and SPOTS evenly spaced
    pieces. As it only samples the data, two checkpoints of the same layout have the same digest if they differ
    only between the pieces.
    """
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for name, info in sorted(source.tensors.items()):
        digest.update(f"{name}\0{info.dtype}\0{list(info.shape)}\0".encode())
    for file in shard_files(source):
        with read_errors(file), file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{size}\0".encode())
            for spot in range(SPOTS):
                stream.seek(max(0, size - PIECE) * spot // (SPOTS - 1))
                digest.update(stream.read(PIECE))
    return digest.hexdigest()


def check_hashes(source: Checkpoint, work: Path, output: Path, check: Callable[[], None]) -> None:
    """Hash every shard. A new run stores the hashes; a resumed run raises an OutputError if one has changed."""
    hash_file, hashes, files = work / "source.json", dict[str, str](), shard_files(source)
    with progress("hashing", len(files), unit="shard") as step:
        for file in files:
            check()
            with read_errors(file):
                hashes[file.name] = file_sha256(file)
            step(file.name)
    if not hash_file.exists():
        if any((work / "layers").glob("*.json")):
            made = "the layers done so far were made without --paranoid"
            print(f"{output}: {made}; hashes are kept from now on", file=sys.stderr)
        write_json(hash_file, hashes)
        return
    for name, old in json.loads(hash_file.read_text()).items():
        if hashes.get(name) != old:
            raise OutputError(
                f"{output}: the source's {name} has other bytes than when this run began (SHA-256 {old[:16]}…, now "
                f"{hashes.get(name, 'gone')[:16]}…); restore it, or start over with --fresh"
            )
