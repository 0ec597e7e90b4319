"""The files of a folder to upload, with their sizes and both hashes that the Hub identifies content by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.output_files import REPORT
from quantizers.system.progress import Step

CHUNK = 1 << 24  # bytes read at a time


@dataclass(frozen=True)
class LocalFile:
    """A file to upload.

    Attributes:
        name: in the folder, and on the Hub.
        size: bytes.
        sha256: the Hub's hash of a file that it stores as LFS or Xet.
        blob: git's blob id (SHA-1), the Hub's hash of any other file.
    """

    name: str
    size: int
    sha256: str
    blob: str


def _is_file(folder: Path, name: str) -> bool:
    return Path(name).name == name and (folder / name).is_file()


def local_files(folder: Path, report: dict[str, Any], step: Step = lambda _: None) -> list[LocalFile]:
    """The files to upload, hashed: those that the run wrote. Any other file in the folder is not uploaded."""
    names = sorted({*report["files"], REPORT})
    files = []
    for name in names:
        if _is_file(folder, name):
            files.append(_hashed(folder / name))
            step(name)
    return files


def hashed_again(folder: Path, files: list[LocalFile], names: list[str]) -> list[LocalFile]:
    """The same files, those hashed again that were written since."""
    return [_hashed(folder / file.name) if file.name in names else file for file in files]


def _hashed(path: Path) -> LocalFile:
    size = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            sha256.update(block)
            blob.update(block)
    return LocalFile(path.name, size, sha256.hexdigest(), blob.hexdigest())
