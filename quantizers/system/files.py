"""Atomic writes and checksums of files: a file appears under its name only when it is complete and on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import OutputError, QuantizeError

BLOCK = 4096  # bytes that a file system gives a file at least
# Remedies by the error of the operating system: another path, or the same again.
NOT_ALLOWED = "choose another folder, or allow it"
ELSEWHERE = {
    errno.EACCES: NOT_ALLOWED,
    errno.EPERM: NOT_ALLOWED,
    errno.EROFS: NOT_ALLOWED,
    errno.ENOENT: "make its folder, or give another",
    errno.ENOTDIR: "a file lies in a folder's place: give another",
    errno.EEXIST: "a file lies in a folder's place: give another",
    errno.EISDIR: "give a file in it",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a path without that link",
}
ROOM = "make room or check the disk, then give the same command again"
AGAIN = {
    errno.ENOSPC: ROOM,
    errno.EDQUOT: ROOM,
    errno.EFBIG: "raise `ulimit -f`, or take a disk for larger files, then give the same command again",
    errno.EBADF: "open it for writing, then give the same command again",
    errno.EMFILE: "raise `ulimit -n`, then give the same command again",
}


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
    written: list[Path] = []
    target = Path()
    try:
        for target, content in contents.items():
            if target.exists() and not (target.is_file() and target.read_bytes() == content):
                raise OutputError(target, "exists", "give another name or folder")
        for target, content in contents.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                written.append(target)
                target.write_bytes(content)
    except OSError as failure:
        for made in written:
            with contextlib.suppress(OSError):  # of a read-only disk, where none was made
                made.unlink()
        raise disk_error(failure, failure.filename or target) from None


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's bytes atomically, into a new folder if need be."""
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as stream, source.open("rb") as read:
            shutil.copyfileobj(read, stream)


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that gets its name when the block ends without an exception."""
    if _is_device(path):  # /dev/null or a pipe, which a file must not replace
        with path.open("wb") as stream:
            yield stream
        return
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException as failure:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(failure, OSError) and failure.filename is None:
            failure.filename = str(path)  # errors of a write name no file
        raise
    sync_folder(path.parent)


def ready_file(path: Path, option: str = "") -> None:
    """Make sure, before long work, that a file can be written: make its folder, and write and remove a block there.

    Raises OutputError or QuantizeError with `option` and the path if it cannot.
    """
    place = f"{option} {path}".lstrip()
    with disk_errors(place):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if _is_device(path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", buffering=0) as stream:
            stream.write(bytes(BLOCK))


def ready_folder(path: Path, option: str = "") -> None:
    """Make sure, before long work, that a folder is there and takes files; errors as of `ready_file`."""
    with disk_errors(f"{option} {path}".lstrip()):
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path, buffering=0) as stream:
            stream.write(bytes(BLOCK))


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


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
def disk_errors(place: object) -> Iterator[None]:
    """Turn the exceptions of a full, failing or read-only disk into a one-line message that says how to continue.

    Args:
        place: the file or folder that is written.
    """
    try:
        yield
    except Exception as failure:
        # safetensors reports a full disk with its own exception type.
        if not isinstance(failure, OSError) and type(failure).__name__ != "SafetensorError":
            raise
        raise disk_error(failure, place) from None


def disk_error(failure: Exception, place: object, problem: str = "cannot be written") -> QuantizeError:
    """An error of the operating system, which may be in the text of a library's error, as one of this program.

    It is an OutputError if another path is the remedy.
    """
    number, reason = getattr(failure, "errno", None) or 0, getattr(failure, "strerror", None) or failure
    if named := re.search(r"\(os error (\d+)\)", str(failure)):
        number = int(named[1])
        reason = os.strerror(number)
    kind = OutputError if number in ELSEWHERE else QuantizeError
    remedy = ELSEWHERE.get(number) or AGAIN.get(number, "check the disk, then give the same command again")
    return kind(place, f"{problem} ({reason})", remedy)


def system_error(failure: OSError) -> QuantizeError | None:
    """A located error for one of a disk that no writer has located; None if it is no disk's, such as of a connection.

    Its place is the file that the failure names.
    """
    if failure.filename is None and failure.errno == errno.ENOENT:  # of the module tempfile
        return QuantizeError("TMPDIR", str(failure.strerror), "set it to a folder with room")
    if failure.errno not in (*ELSEWHERE, *AGAIN, errno.EIO):
        return None
    return disk_error(failure, failure.filename or "a disk", "cannot be read or written")


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
