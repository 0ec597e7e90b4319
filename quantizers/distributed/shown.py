"""The progress of work that several processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from quantizers.system.progress import Step, checked, progress

from .dist import ProcessGroup


@contextlib.contextmanager
def shown(
    title: str, total: int, done: int, check: Callable[[], None], dist: ProcessGroup, *, unit: str = ""
) -> Iterator[Step]:
    """Progress in rank 0, none in the others; before each step, `check` may interrupt.

    Args:
        title, total, done, unit: see `progress`.
    """
    with progress(title, total, done, unit) if dist.is_main else contextlib.nullcontext(lambda _: None) as step:
        yield checked(step, check)
