"""Total and free memory of the machine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def total() -> int:
    """Bytes of the machine, or of this container if that is less."""
    whole: int = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        return min(whole, int((CGROUP / "memory.max").read_text()))
    return whole


def available() -> int:
    """Bytes that can still be allocated without swapping: of the machine, or of this container if that is less."""
    free: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # "max" if there is no limit; no such files elsewhere
        limit = int((CGROUP / "memory.max").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(stat["inactive_file"])  # cached files give way
        free = min(free, limit - used)
    return max(free, 0)
