"""Reading and writing in background threads, with a fixed amount of memory.

A thread reads the bytes of the next layer and discards them. They stay in the page cache, where the real
read of that layer finds them. The process itself holds none of them, so its memory is still bounded by one
layer. The thread ignores read errors, because the real read will raise them. Another thread writes, hashes
and syncs a finished shard while the layer's output is computed; the layer is not marked as done before that
thread has finished.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from .safetensors_header import TensorInfo

BLOCK = 2**20  # bytes read at a time, and all the memory that reading ahead needs
Result = TypeVar("Result")


@contextlib.contextmanager
def in_background(work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Run `work` in a thread. The yielded function waits for it and returns its result, or raises its error.

    Leaving the block also waits, even after an exception, so no write is interrupted.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool.submit(work).result


@contextlib.contextmanager
def read_ahead(tensors: Iterable[TensorInfo]) -> Iterator[None]:
    """Within the block, a thread reads the bytes of these tensors into the page cache.

    When the block ends, the thread stops; the remaining tensors stay unread.
    """
    stop = Event()
    with in_background(lambda: _read(sorted(tensors, key=lambda info: (info.file, info.start)), stop)):
        try:
            yield
        finally:
            stop.set()


def _read(tensors: Iterable[TensorInfo], stop: Event) -> None:
    buffer = memoryview(bytearray(BLOCK))
    for info in tensors:
        with contextlib.suppress(OSError), info.file.open("rb", buffering=0) as stream:
            stream.seek(info.start)
            left = info.size
            while left > 0 and not stop.is_set():
                got = stream.readinto(buffer[: min(left, BLOCK)])
                if not got:
                    break
                left -= got
        if stop.is_set():
            return
