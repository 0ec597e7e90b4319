"""Seconds by phase of the work that a thread does within `listening`.

    with listening(Clock(device)) as clock:
        solve(…)
    clock.seconds()          # {"forced pass": 2.4, "Hessians": 0.6, …}

Phases do not nest.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

import torch

from quantizers.system.progress import doing


class Clock:
    """Sums of seconds by phase: wall-clock time, or on a GPU CUDA events, read once at the end: nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`."""
        if self.device.type == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((name, before, after))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def seconds(self) -> dict[str, float]:
        """Seconds by name so far, names in order of first use. Waits for a GPU."""
        if self._events:
            torch.cuda.synchronize(self.device)
            for name, before, after in self._events:
                self._seconds[name] += before.elapsed_time(after) / 1000
            self._events.clear()
        return dict(self._seconds)


Item = TypeVar("Item")

_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def listening(clock: Clock) -> Iterator[Clock]:
    """Time all phases of this thread within the block."""
    token = _clock.set(clock)
    try:
        yield clock
    finally:
        _clock.reset(token)


def timed_items(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The same items; waiting for each is timed under `name`."""
    iterator = iter(items)
    while True:
        with phase(name):
            found = list(itertools.islice(iterator, 1))
        if not found:
            return
        yield found.pop()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Time the block under `name`, if this thread is within `listening`, and show the name as current work."""
    doing(name)
    clock = _clock.get()
    with clock.block(name) if clock else contextlib.nullcontext():
        yield
