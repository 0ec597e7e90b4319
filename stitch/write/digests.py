"""Digests of what a run writes, taken at the time of writing, so that any later change can be named.

A shard's SHA-256 shows that it changed; eight bytes of BLAKE2b per tensor show which tensor did. (A full
hash per tensor would make the report of a 256-expert model 12 MB.) Both go into the journal when the shard
is written, and into report.json at the end. The proof compares the shards with these digests, never with
ones that it computes itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quantizers.checkpoint.reader import read_bytes
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.system.errors import CheckpointError
from quantizers.system.own_files import file_sha256

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
    import torch

    def digest(tensor: torch.Tensor) -> str:
        return _short(tensor.flatten().view(torch.uint8).numpy().tobytes())

    return "".join(digest(tensors[name]) for name in sorted(tensors))


def _short(raw: bytes | bytearray) -> str:
    return hashlib.blake2b(raw, digest_size=TENSOR_BYTES).hexdigest()


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


def changes(file: Path, written: ShardDigest) -> list[str]:
    """What changed in a shard since it was written, one line each; empty if the file's hash is equal.

    A line names the changed tensor, or the file if it holds another number of tensors, cannot be read, or changed
    only in its header.
    """
    size = 2 * TENSOR_BYTES
    known = [written["tensors"][i : i + size] for i in range(0, len(written["tensors"]), size)]
    try:
        if file_sha256(file) == written["sha256"]:
            return []
        header = read_header(file)
        if len(known) != len(header):
            return [f"{file.name}: changed since the run wrote it: {len(known)} tensors then, {len(header)} now"]
        pairs = zip(sorted(header), known, strict=True)
        changed = [name for name, digest in pairs if _short(read_bytes(header[name])) != digest]
    except OSError as failure:
        return [f"{file.name}: cannot be read ({failure.strerror})"]
    except CheckpointError as failure:
        return [f"{file.name}: changed since the run wrote it ({failure})"]
    return [f"{name}: changed since the run wrote it" for name in changed] or [
        f"{file.name}: changed since the run wrote it, in its header alone"
    ]
