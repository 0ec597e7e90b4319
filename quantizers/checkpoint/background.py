"""Reading and writing beside the work, within a fixed bound of memory.

The next layer's bytes are read by a thread and forgotten: afterwards they lie in the page cache, from
where the layer's own reading takes them. This process holds none of them, so the bound of one layer
stays, and an error needs no way back: who really reads the bytes will meet it. A finished shard is
written, hashed and synced by another thread while the layer's output is computed; its outcome is
waited for before the layer counts as done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from .safetensors_header import TensorInfo

BLOCK = 2**20  # bytes read at a time: all the memory that reading ahead takes
Result = TypeVar("Result")


@contextlib.contextmanager
def in_background(work: Callable[[], Result]) -> Iterator[Callable[[], Result]]:
    """Run `work` in a thread. The yielded function waits for it and returns its result, or raises its error.

    Leaving the block waits as well: no write is cut off, whatever ended the block.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        yield pool.submit(work).result


@contextlib.contextmanager
def read_ahead(tensors: Iterable[TensorInfo]) -> Iterator[None]:
    """Within the block, a thread brings the bytes of these tensors into the page cache.

    What it has not come to when the block ends stays unread.
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
