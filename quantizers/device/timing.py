"""Phases of the solver's work: shown as current work, and timed if somebody listens. They do not nest."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TypeVar

from quantizers.system.progress import doing

Item = TypeVar("Item")
Timer = Callable[[str], contextlib.AbstractContextManager[None]]  # times a block, given the phase's name
timer: ContextVar[Timer | None] = ContextVar("timer", default=None)  # of this thread


def timed_items(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The same items; waiting for each is timed under `name`."""
    iterator = iter(items)
    while True:
        with phase(name):
            following = list(itertools.islice(iterator, 1))
        if not following:
            return
        yield following.pop()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Time the block under `name`, if this thread has a `timer`, and show the name as current work."""
    doing(name)
    timed = timer.get()
    with timed(name) if timed else contextlib.nullcontext():
        yield
