"""Ctrl-C and SIGTERM stop a run between two steps, never during a write."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from .errors import Interrupted

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


def handle_signals(handler: Handler, *numbers: int) -> contextlib.ExitStack:
    """Set a handler for signals; closing what is returned restores the earlier ones. Has no effect in other threads."""
    restore = contextlib.ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            restore.callback(signal.signal, number, signal.signal(number, handler))
    return restore


@contextlib.contextmanager
def stoppable(*, by_launcher: bool = False) -> Iterator[None]:
    """Within the block SIGTERM raises at once, as Ctrl-C does. For all commands but runs, and before a run starts.

    A launcher sends signals when a process has failed. A process started `by_launcher` ignores them after the block,
    since it is about to say why it ends.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted("", "interrupted by SIGTERM", "give the same command again", number)

    restore = handle_signals(stop, signal.SIGTERM)
    try:
        yield
    finally:
        if by_launcher:
            handle_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM)
        else:
            restore.close()


@contextlib.contextmanager
def interruptible(advice: str) -> Iterator[Callable[[], None]]:
    """Within the block the first signal is only recorded, and the yielded function raises Interrupted after it.

    A second signal has its usual effect. `advice` is how to continue, for the message.
    """
    caught: list[int] = []
    handlers = contextlib.ExitStack()

    def record(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        handlers.close()

    def check() -> None:
        if caught:
            raise Interrupted("", f"interrupted by {signal.Signals(caught[0]).name}", advice, caught[0])

    with handlers:
        handlers.enter_context(handle_signals(record, signal.SIGINT, signal.SIGTERM))
        yield check
