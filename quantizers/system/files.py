"""Atomic writes and checksums of files: a file appears under its name only when it is complete and on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import OutputError, QuantizeError


def write_json(path: Path, data: Any) -> None:
    """Write JSON with sorted keys, atomically. Raises ValueError for NaN and infinity; see `json_finite`."""
    write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a small file atomically: temporary file, fsync, rename, fsync of the folder."""
    with disk_errors(path), atomic(path) as stream:
        stream.write(text.encode())


def write_new(contents: Mapping[Path, bytes]) -> None:
    """Write files, all or none of them; those that exist with the same bytes stay.

    Raises OutputError where one exists with other bytes, or cannot be written.
    """
    for target, content in contents.items():
        if target.exists() and not (target.is_file() and target.read_bytes() == content):
            raise OutputError(target, "exists", "give another name or folder")
    written: list[Path] = []
    try:
        for target, content in contents.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                written.append(target)
                target.write_bytes(content)
    except OSError as failure:
        for target in written:
            target.unlink(missing_ok=True)
        raise OutputError(failure.filename, f"cannot be written ({failure.strerror})", "give another place") from None


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's bytes atomically, into a new folder if need be."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as stream, source.open("rb") as read:
            shutil.copyfileobj(read, stream)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that gets its name when the block ends without an exception."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(existing for existing in (path.absolute(), *path.absolute().parents) if os.path.exists(existing))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the exceptions of a full, failing or read-only disk into a one-line message that says how to continue."""
    try:
        yield
    except Exception as failure:
        # safetensors reports a full disk with its own exception type.
        if not isinstance(failure, OSError) and type(failure).__name__ != "SafetensorError":
            raise
        reason = getattr(failure, "strerror", None) or failure
        if getattr(failure, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise OutputError(path, f"cannot be written ({reason})", "choose another folder, or allow it") from None
        raise QuantizeError(
            path, f"cannot be written ({reason})", "make room or check the disk, then give the same command again"
        ) from None


def json_finite(data: Any) -> Any:
    """The same data with None in place of every NaN or infinity; tuples become lists."""
    if isinstance(data, dict):
        return {key: json_finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [json_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal. Raises OSError if it cannot be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
