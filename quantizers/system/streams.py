"""Standard output and error that take every text, and say in one line where they cannot be written."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Any

from .errors import InputError
from .files import disk_error


class _Stream(io.FileIO):
    """The file of a standard stream. After the first write that failed it takes, and loses, whatever comes.

    Standard output raises that failure, but for a reader that has gone: `quantize plan … | head -1` has what it wanted.
    Standard error raises none: it holds progress and notes, and a log on a full disk must not end a run.
    """

    def __init__(self, number: int, *, is_output: bool) -> None:
        super().__init__(number, "wb", closefd=False)
        self._is_output, self._lost = is_output, False

    def write(self, data: Any) -> int:
        """Write bytes. Raises QuantizeError, once, if standard output lies on a full disk or the like."""
        if not self._lost:
            try:
                return super().write(data)
            except OSError as failure:
                self._lost = True
                if self._is_output and failure.errno != errno.EPIPE:
                    raise disk_error(failure, f"standard output{_named(self.fileno())}") from None
        return memoryview(data).nbytes


def settle_names() -> None:
    """Start the program again where names of files are ASCII alone, as by LC_ALL=C with PYTHONUTF8=0.

    There a folder called Größe cannot be opened, and is said to be missing. The streams keep their encoding.

    Raises:
        InputError: an argument or the current folder's name is no UTF-8 text, or that folder was removed; neither
            opens for libraries.
    """
    if codecs.lookup(sys.getfilesystemencoding()).name == "ascii" and not sys.flags.utf8_mode:
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise InputError("the current folder", "was removed", "`cd` to one that is there") from None
    for name in (*sys.argv[1:], here):
        if name != name.encode(errors="ignore").decode():
            raise InputError(name, "has letters that are no UTF-8, which libraries refuse", "rename it")


def settle_streams() -> None:
    """Put both streams on a `_Stream`, and write letters that their encoding lacks as escapes, such as `\\u2013`.

    What is no file, as in a notebook, stays as it is.

    Raises:
        InputError: standard output is closed, so the result would be lost.
    """
    is_closed = sys.stdout is None
    for standard, name in enumerate(("stdout", "stderr"), 1):
        stream: io.TextIOWrapper | None = getattr(sys, name)
        if stream is None:
            _occupy(standard)
        if stream is None or _is_file(stream):
            number = standard if stream is None else stream.fileno()
            buffer = io.BufferedWriter(_Stream(number, is_output=name == "stdout"))
            by_line = stream is None or stream.line_buffering or stream.write_through
            encoding = stream.encoding if stream else "utf-8"
            setattr(sys, name, io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=by_line))
    if is_closed:
        raise InputError("standard output", "is closed, so the result would be lost", "send it somewhere: > result.txt")


def _is_file(stream: io.TextIOWrapper) -> bool:
    """Whether a stream is a file of the system that is not settled yet; what it holds is written."""
    try:
        stream.flush()
        stream.fileno()
    except (OSError, ValueError):
        return False
    return isinstance(stream, io.TextIOWrapper) and not isinstance(getattr(stream.buffer, "raw", None), _Stream)


def _named(number: int) -> str:
    """` (/tmp/result.txt)`: the file of a stream, where the system knows it."""
    try:
        return f" ({os.readlink(f'/proc/self/fd/{number}')})"
    except OSError:
        return ""


def _occupy(number: int) -> None:
    """Open /dev/null under the number of a closed stream: the next file that is opened would get what is printed."""
    try:
        os.fstat(number)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
