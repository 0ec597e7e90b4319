"""Fingerprints of what a run wrote, kept in report.json, so that a later change can be named.

A shard's SHA-256 tells that it changed; eight bytes of BLAKE2b for each of its tensors tell which
tensor did. (A full hash per tensor would make the report of a 256-expert model 12 MB.)
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypedDict

from quantizers.checkpoint import read_bytes
from quantizers.safetensors_header import TensorInfo, read_header

TENSOR_BYTES = 8


class ShardDigest(TypedDict):
    """`sha256` of the file; `tensors`: the tensors' digests in the order of their names, joined."""

    sha256: str
    tensors: str


def tensor_digest(info: TensorInfo) -> str:
    """Eight bytes of BLAKE2b over a tensor's bytes, hexadecimal."""
    return hashlib.blake2b(read_bytes(info), digest_size=TENSOR_BYTES).hexdigest()


def shard_digest(file: Path) -> ShardDigest:
    """Read a shard from the disk and fingerprint it."""
    header = read_header(file)
    with file.open("rb") as stream:
        whole = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"sha256": whole, "tensors": "".join(tensor_digest(header[name]) for name in sorted(header))}


def changed_tensors(file: Path, recorded: ShardDigest) -> list[str]:
    """Names of the tensors whose bytes are not those recorded; empty when the file's hash is equal."""
    with file.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() == recorded["sha256"]:
            return []
    header = read_header(file)
    size = 2 * TENSOR_BYTES
    known = [recorded["tensors"][i : i + size] for i in range(0, len(recorded["tensors"]), size)]
    if len(known) != len(header):
        return []  # tensors were added or dropped, which the audit names by itself
    return [name for name, digest in zip(sorted(header), known, strict=True) if tensor_digest(header[name]) != digest]
