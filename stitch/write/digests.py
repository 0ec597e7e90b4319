"""Digests of shards, computed when they are written, to detect and locate any later change.

A shard's SHA-256 shows that it changed, eight bytes of BLAKE2b per tensor show which tensor did. (A full hash per
tensor would make the report of a 256-expert model 12 MB.) Both go into the journal when the shard is written, and into
report.json at the end. Verification compares the shards with these digests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypedDict

from quantizers.checkpoint.reader import as_bytes
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.system.errors import CheckpointError
from quantizers.system.files import file_sha256
from quantizers.system.output_files import is_within
from quantizers.system.thread_map import thread_map

if TYPE_CHECKING:
    import torch

TENSOR_BYTES = 8


class ShardDigest(TypedDict):
    """`bytes` and `sha256` of the file; `tensors`: the tensors' digests in the order of their names, joined."""

    bytes: int
    sha256: str
    tensors: str


def joined_digests(tensors: Mapping[str, torch.Tensor]) -> str:
    """`ShardDigest.tensors` of contiguous tensors on the CPU."""
    with closing(thread_map(_short, (as_bytes(tensors[name]) for name in sorted(tensors)))) as found:
        return "".join(found)


def _short(raw: bytes | memoryview) -> str:
    return hashlib.blake2b(raw, digest_size=TENSOR_BYTES).hexdigest()


def read_back(file: Path, wanted: Collection[str] = ()) -> tuple[ShardDigest, dict[str, str]]:
    """The digests of a shard that is read once, and the SHA-256, hexadecimal, of the wanted tensors.

    Raises a CheckpointError if it is not a whole safetensors file, an OSError if it cannot be read.
    """
    header, whole = read_header(file), hashlib.sha256()
    size = min((info.start for info in header.values()), default=file.stat().st_size)

    def pieces(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
        whole.update(stream.read(size))
        for name, info in header.items():  # in the order of their bytes, without gaps
            raw = stream.read(info.size)
            whole.update(raw)
            yield name, raw

    def hashed(piece: tuple[str, bytes]) -> tuple[str, str, str]:
        name, raw = piece
        return name, _short(raw), hashlib.sha256(raw).hexdigest() if name in wanted else ""

    with file.open("rb") as stream, closing(thread_map(hashed, pieces(stream))) as found:
        hashes = {name: (short, full) for name, short, full in found}
    digest: ShardDigest = {
        "bytes": size + sum(info.size for info in header.values()),
        "sha256": whole.hexdigest(),
        "tensors": "".join(hashes[name][0] for name in sorted(hashes)),
    }
    return digest, {name: full for name, (_, full) in hashes.items() if full}


def recorded_digests(report: dict[str, Any]) -> dict[str, ShardDigest]:
    """The digests in a report, by shard in its folder, without the malformed ones of a damaged report."""
    audit, kinds = report.get("audit"), ShardDigest.__annotations__.keys()
    by_shard = audit.get("digests") if isinstance(audit, dict) else None
    return {
        name: {"bytes": digest["bytes"], "sha256": digest["sha256"], "tensors": digest["tensors"]}
        for name, digest in (by_shard.items() if isinstance(by_shard, dict) else ())
        if is_within(name)
        and isinstance(digest, dict)
        and kinds <= digest.keys()
        and isinstance(digest["tensors"], str)
    }


def changes(file: Path, written: ShardDigest, *, past_the_cache: bool = False) -> list[str]:
    """The changes in a shard since it was written, one line each; none if its SHA-256 is equal.

    A line names the changed tensor; or the file, if that has another number of tensors, cannot be read, or changed only
    in its header. With `past_the_cache` the system's cached copy is dropped first, so that the disk is read.
    """
    try:
        if past_the_cache:
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
        f"{file.name}: changed since the run wrote it, only in its header"
    ]


def split(tensors: str) -> list[str]:
    """The digests joined in `ShardDigest.tensors`."""
    return [tensors[i : i + 2 * TENSOR_BYTES] for i in range(0, len(tensors), 2 * TENSOR_BYTES)]
