"""The files of a folder that are sent, each with the two names by which the Hub knows its content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.own_files import REPORT

CHUNK = 1 << 24


Step = Callable[[str], None]


@dataclass(frozen=True)
class LocalFile:
    """A file as it will lie on the Hub: its name, its bytes, and the two names that the Hub knows content by."""

    name: str
    size: int
    sha256: str
    blob: str


def _is_file(folder: Path, name: str) -> bool:
    return Path(name).name == name and (folder / name).is_file()


def local_files(folder: Path, report: dict[str, Any], step: Step = lambda _: None) -> list[LocalFile]:
    """The files to send, hashed: those that the run wrote. Anything else in the folder stays where it is."""
    names = sorted({*report["files"], REPORT})
    files = []
    for name in names:
        if _is_file(folder, name):
            files.append(_hashed(folder / name))
            step(name)
    return files


def _hashed(path: Path) -> LocalFile:
    size = path.stat().st_size
    whole, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            whole.update(block)
            blob.update(block)
    return LocalFile(path.name, size, whole.hexdigest(), blob.hexdigest())
