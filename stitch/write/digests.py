"""Digests of what a run writes, taken at the time of writing, so that any later change can be named.

A shard's SHA-256 shows that it changed; eight bytes of BLAKE2b per tensor show which tensor did. (A full
hash per tensor would make the report of a 256-expert model 12 MB.) Both go into the journal when the shard
is written, and into report.json at the end. The proof compares the shards with these digests, never with
ones that it computes itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quantizers.checkpoint.safetensors_header import read_header
from quantizers.checkpoint.tensor_bytes import as_bytes
from quantizers.system.errors import CheckpointError
from quantizers.system.files import file_sha256
from quantizers.system.thread_map import thread_map

if TYPE_CHECKING:
    import torch

TENSOR_BYTES = 8


class ShardDigest(TypedDict):
    """`bytes` and `sha256` of the file; `tensors`: the tensors' digests, sorted by tensor name and joined."""

    bytes: int
    sha256: str
    tensors: str


def joined_digests(tensors: Mapping[str, torch.Tensor]) -> str:
    """`ShardDigest.tensors` of tensors on the CPU, contiguous, before they are written."""
    with closing(thread_map(_short, (as_bytes(tensors[name]) for name in sorted(tensors)))) as found:
        return "".join(found)


def _short(raw: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(raw, digest_size=TENSOR_BYTES).hexdigest()


def read_back(file: Path, wanted: Collection[str] = ()) -> tuple[ShardDigest, dict[str, str]]:
    """Read a shard once, and take its digests from what lies in the file.

    The hash of the file is taken byte after byte, those of the tensors meanwhile by other threads.

    Args:
        wanted: tensors whose SHA-256 is returned as well.

    Returns:
        The digests, and the SHA-256, hexadecimal, of the tensors asked for.

    Raises:
        CheckpointError: the file is not a whole safetensors file.
        OSError: it cannot be read.
    """
    header, whole = read_header(file), hashlib.sha256()
    size = min((info.start for info in header.values()), default=file.stat().st_size)

    def arriving(stream: FileIO) -> Iterator[tuple[str, bytearray]]:
        whole.update(_exactly(stream, size, file))
        for name, info in header.items():  # in the order of their bytes, without gaps
            raw = _exactly(stream, info.size, file)
            whole.update(raw)
            yield name, raw

    def hashed(arrived: tuple[str, bytearray]) -> tuple[str, str, str | None]:
        name, raw = arrived
        return name, _short(raw), hashlib.sha256(raw).hexdigest() if name in wanted else None

    with file.open("rb", buffering=0) as stream, closing(thread_map(hashed, arriving(stream))) as found:
        hashes = {name: (short, full) for name, short, full in found}
    tensors = "".join(hashes[name][0] for name in sorted(hashes))
    digest: ShardDigest = {
        "bytes": size + sum(info.size for info in header.values()),
        "sha256": whole.hexdigest(),
        "tensors": tensors,
    }
    return digest, {name: full for name, (_, full) in hashes.items() if full is not None}


def _exactly(stream: FileIO, size: int, file: Path) -> bytearray:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        count = stream.readinto(view[got:])
        if not count:
            raise CheckpointError(f"{file}: the file is truncated")
        got += count
    return buffer


def recorded_digests(report: Any) -> dict[str, ShardDigest]:
    """The digests in a report, by shard; malformed ones, from a damaged report, are left out."""
    audit = report.get("audit") if isinstance(report, dict) else None
    by_shard = audit.get("digests") if isinstance(audit, dict) else None
    kinds = ShardDigest.__annotations__.keys()
    return {
        str(name): {"bytes": digest["bytes"], "sha256": digest["sha256"], "tensors": digest["tensors"]}
        for name, digest in (by_shard.items() if isinstance(by_shard, dict) else ())
        if isinstance(digest, dict) and kinds <= digest.keys() and isinstance(digest["tensors"], str)
    }


def changes(file: Path, written: ShardDigest, *, past_the_cache: bool = False) -> list[str]:
    """What changed in a shard since it was written, one line each; empty if its hash is equal, which is read once.

    A line names the changed tensor, or the file if it holds another number of tensors, cannot be read, or changed
    only in its header.

    Args:
        past_the_cache: ask the system to forget its copy of the file first, so that the disk itself is read.
    """
    try:
        if past_the_cache:
            forget(file)
        if file_sha256(file) == written["sha256"]:
            return []
        found, names = read_back(file)[0], sorted(read_header(file))
    except OSError as failure:
        return [f"{file.name}: cannot be read ({failure.strerror})"]
    except CheckpointError as failure:
        return [f"{file.name}: changed since the run wrote it ({failure})"]
    known, now = split(written["tensors"]), split(found["tensors"])
    if len(known) != len(now):
        return [f"{file.name}: changed since the run wrote it: {len(known)} tensors then, {len(now)} now"]
    changed = [name for name, old, new in zip(names, known, now, strict=True) if old != new]
    return [f"{name}: changed since the run wrote it" for name in changed] or [
        f"{file.name}: changed since the run wrote it, in its header alone"
    ]


def forget(file: Path) -> None:
    """Ask the system to drop what it has of a file in memory; it need not comply, and only some systems can."""
    if hasattr(os, "posix_fadvise"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def split(tensors: str) -> list[str]:
    """The digests that `ShardDigest.tensors` joins."""
    return [tensors[i : i + 2 * TENSOR_BYTES] for i in range(0, len(tensors), 2 * TENSOR_BYTES)]
