"""Number of cores that this process may use, and of threads that its user asks for."""

from __future__ import annotations

import os
import re

from .cgroups import Limit, cpu_limits
from .errors import InputError

THREADS = "OMP_NUM_THREADS"
MOST_THREADS = 1024  # more are a mistake, and end the process when they are started


def limits() -> list[Limit]:
    """The cores that the scheduler gives the process (taskset, cpusets), and the time that its cgroups have."""
    count = len(os.sched_getaffinity(0))
    return [Limit(count, count, ""), *cpu_limits()]


def cores() -> int:
    """The least of the limits: at least 1."""
    return min(limit.most for limit in limits())


def threads_asked() -> int | None:
    """The first number in OMP_NUM_THREADS, which may list one for each level of nested threads; None if it is unset.

    Raises:
        InputError: it is no list of numbers. OpenMP would ignore it, or fail when it starts so many threads.
    """
    text = os.environ.get(THREADS, "").strip()
    if not text:
        return None
    words = [word.strip() for word in text.split(",")]
    if all(re.fullmatch(r"\+?[0-9]{1,9}", word) and 1 <= int(word) <= MOST_THREADS for word in words):
        return int(words[0])
    problem = f"{text!r} is no number of threads, 1 to {MOST_THREADS:,}"
    raise InputError(THREADS, problem, f"unset it, or set {THREADS}={cores()}")
