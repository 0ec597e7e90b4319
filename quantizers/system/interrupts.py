"""Ctrl-C and SIGTERM stop a run between two steps, never during a write."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from .errors import Interrupted


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within the block SIGTERM raises at once, as Ctrl-C does. For all commands but runs, and before a run starts."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("interrupted by SIGTERM; give the same command again", number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def interruptible(advice: str) -> Iterator[Callable[[], None]]:
    """Within the block the first signal is only recorded; the yielded function raises if there was one.

    Args:
        advice: how to continue, for the message.

    Raises:
        Interrupted: from the yielded function. A second signal has its usual effect.
    """
    caught: list[int] = []
    previous: dict[int, Any] = {}  # handlers, as signal.signal returns them

    def record(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)

    def check() -> None:
        if caught:
            raise Interrupted(f"interrupted by {signal.Signals(caught[0]).name}; {advice}", caught[0])

    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
