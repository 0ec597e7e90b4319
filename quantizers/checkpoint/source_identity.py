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

from .reader import COMMIT, Checkpoint
from .safetensors_header import read_errors

SPOTS, PIECE = 32, 4096  # number and bytes of the pieces of each shard that `source_digest` covers


def shard_files(source: Checkpoint) -> list[Path]:
    """The files that contain its tensors."""
    return sorted({info.file for info in source.tensors.values()})


def source_stats(source: Checkpoint) -> dict[str, Any]:
    """Size and modification time (in nanoseconds) of each shard; of one on the Hub its size and the Hub's hash."""
    stats: dict[str, Any] = {}
    for file in shard_files(source):
        if source.remote:
            on_hub = source.remote.files[file.name]
            stats[file.name] = {"bytes": on_hub.size, "hash": on_hub.digest}
            continue
        with read_errors(file):
            stat = file.stat()
        stats[file.name] = {"bytes": stat.st_size, "changed": stat.st_mtime_ns}
    return stats


def source_digest(source: Checkpoint) -> str:
    """SHA-256, hexadecimal, that identifies a source in any folder, without reading all of it.

    It covers config.json, every tensor's name, dtype and shape, and of each shard the size and SPOTS evenly spaced
    pieces: checkpoints that differ only between these have the same. Of shards on the Hub it covers the Hub's hashes.
    """
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for name, info in sorted(source.tensors.items()):
        digest.update(f"{name}\0{info.dtype}\0{list(info.shape)}\0".encode())
    for file in shard_files(source):
        if source.remote:
            digest.update(f"{source.remote.files[file.name].digest}\0".encode())
            continue
        with read_errors(file), file.open("rb") as stream:
            size = file.stat().st_size
            digest.update(f"{size}\0".encode())
            for spot in range(SPOTS):
                stream.seek(max(0, size - PIECE) * spot // (SPOTS - 1))
                digest.update(stream.read(PIECE))
    return digest.hexdigest()


def is_source(recorded: Any, source: Checkpoint, model: str) -> bool:
    """Whether a report's `source` is this one: by its digest, or as the same commit of `model`, a Hub id.

    A source that is read from the Hub has another kind of digest than the same in a folder.
    """
    if not isinstance(recorded, dict):
        return False
    made_at = recorded.get("revision")
    if (recorded.get("model"), made_at) == (model, source.revision) and COMMIT.fullmatch(str(made_at)):
        return True
    return recorded.get("digest") == source_digest(source)


def check_hashes(source: Checkpoint, work: Path, output: Path, check: Callable[[], None]) -> None:
    """Hash every shard. A new run stores the hashes; a resumed run raises an OutputError if one has changed."""
    if source.remote:  # they are compared with the Hub's hashes as they arrive
        return
    hash_file = work / "source.json"
    hashes = dict[str, str]()
    files = shard_files(source)
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
                output,
                f"the source's {name} has other bytes than when this run began (SHA-256 {old[:16]}…, now "
                f"{hashes.get(name, 'gone')[:16]}…)",
                "restore it, or start over with --fresh",
            )
