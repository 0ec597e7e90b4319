"""What the tests of publishing share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

TOKEN = "hf_" + "s3cretNeverToBeSeen" * 2
REPO = "me/tiny-FP8-INT4"
SHARD = "model-00002-of-00005.safetensors"
Publish = Callable[..., tuple[int, str, str]]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def break_a_byte(folder: Path, name: str = SHARD) -> None:
    raw = bytearray((folder / name).read_bytes())
    raw[-3] ^= 1
    (folder / name).write_bytes(raw)
