"""Total and free memory of the machine, or of the part of it that this process may use."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import psutil

from .cgroups import Limit, memory_limits

# Limits of `ulimit`, and what of psutil's `memory_info` counts against each.
ULIMITS = {resource.RLIMIT_AS: ("ulimit -v", "vms"), resource.RLIMIT_DATA: ("ulimit -d", "data")}


def limits() -> list[Limit]:
    """The machine's memory, that of the process's cgroups, and that of `ulimit`."""
    whole = psutil.virtual_memory()
    return [Limit(whole.total, whole.available, ""), *memory_limits(), *_ulimits()]


def _ulimits() -> Iterator[Limit]:
    used = psutil.Process().memory_info()
    for kind, (name, counted) in ULIMITS.items():
        if (most := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            yield Limit(most, most - getattr(used, counted), name)


def total() -> int:
    """Bytes of the machine, or of the least of the limits on this process."""
    return min(limit.most for limit in limits())


def available() -> int:
    """Bytes that can still be allocated without swapping: on the machine, and within each limit on this process."""
    return max(0, min(limit.left for limit in limits()))
