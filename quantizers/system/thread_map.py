"""A parallel map with threads and a bounded queue, for reading and hashing files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from .cores import cores

Item = TypeVar("Item")
Made = TypeVar("Made")
THREADS = 8  # threads, at most


def thread_map(make: Callable[[Item], Made], items: Iterable[Item]) -> Generator[Made]:
    """`make(item)` of every item, in their order, by as many threads as there are cores, up to THREADS.

    An item is asked for when a thread may soon be free for it, so that few of them are in memory at a time. Close the
    iterator to cancel pending items. An exception of `make` is raised in its turn.
    """
    threads = min(THREADS, cores())
    waiting = deque[Future[Made]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
