"""Digests of what a run wrote, taken as it is written and kept, so that any later change can be named.

A shard's SHA-256 tells that it changed; eight bytes of BLAKE2b for each of its tensors tell which
tensor did. (A full hash per tensor would make the report of a 256-expert model 12 MB.) Both are in the
journal from the moment of writing on, and in report.json at the end: the proof compares the shards with
these, never with digests of its own.
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
    """`bytes` and `sha256` of the file; `tensors`: the tensors' digests in the order of their names, joined."""

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
    """The digests in a report, by shard; those that are none, in a damaged report, are left out."""
    audit = report.get("audit") if isinstance(report, dict) else None
    found = audit.get("digests") if isinstance(audit, dict) else None
    kinds = ShardDigest.__annotations__.keys()
    return {
        str(name): {"bytes": digest["bytes"], "sha256": digest["sha256"], "tensors": digest["tensors"]}
        for name, digest in (found.items() if isinstance(found, dict) else ())
        if isinstance(digest, dict) and kinds <= digest.keys() and isinstance(digest["tensors"], str)
    }


def changes(file: Path, written: ShardDigest) -> list[str]:
    """What is not as it was written, one line each; empty when the file's hash is equal.

    A changed tensor is named; the file itself where it holds others, cannot be read, or changed outside of them.
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
