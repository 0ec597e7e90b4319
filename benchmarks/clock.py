"""Seconds by phase of the solver's work that a thread does within `listening`.

with listening(Clock(device)) as clock:
    solve(…)
clock.seconds()          # {"forced pass": 2.4, "Hessians": 0.6, …}
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from quantizers.device.timing import timer


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


@contextlib.contextmanager
def listening(clock: Clock) -> Iterator[Clock]:
    """Time all phases of this thread within the block."""
    token = timer.set(clock.block)
    try:
        yield clock
    finally:
        timer.reset(token)
