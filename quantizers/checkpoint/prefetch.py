"""Prefetch of a checkpoint's parts: while one part is in use, a thread reads the next.

Two buffers alternate: fresh memory for a layer of 3.6 GB would cost a page fault for each 4 KiB, a million a layer. So
a part's tensors are valid until the next part is asked for.

Each of several processes reads all parts, on a machine mostly from the page cache, and compares their hashes with
those of rank 0. A finished shard, which rank 0 alone has, it broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import CheckpointError

from .loaded_tensors import LoadedTensors, bytes_needed, load_tensors, tensors_in_memory
from .reader import Checkpoint, torch_dtype

if TYPE_CHECKING:
    import torch


def prefetched_tensors(
    checkpoint: Checkpoint,
    parts: Sequence[Sequence[str]],
    dist: ProcessGroup = SINGLE_PROCESS,
    prepare: Callable[[torch.Tensor], object] = lambda _: None,
    arrived: Callable[[LoadedTensors], object] = lambda _: None,
) -> Generator[LoadedTensors]:
    """Each part in its turn, while a thread reads the one after it. Close the iterator to stop the thread early.

    A part is emptied when the next one is asked for, since its memory gets the bytes of the part after that.

    Args:
        parts: the names of each part's tensors.
        dist: the processes that ask for the same parts; each has the checkpoint on its machine.
        prepare: called with each of the two buffers, once, before anything is read.
        arrived: called by the thread with each part as it has been read.

    Raises:
        CheckpointError: as `load_tensors`, when the part's turn comes; or this process has read other bytes than
            rank 0.
    """
    import torch

    size = max((bytes_needed(checkpoint.tensors[name] for name in names) for names in parts), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in parts[:2]]
    for buffer in buffers:
        prepare(buffer)
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:

        def read(position: int) -> LoadedTensors:
            loaded = load_tensors(checkpoint, parts[position], stop, buffers[position % 2])
            if not stop.is_set():
                arrived(loaded)
            return loaded

        def begin(position: int) -> list[Future[LoadedTensors]]:
            return [pool.submit(read, position)] if position < len(parts) else []

        try:
            reading = begin(0)
            for position in range(len(parts)):
                loaded = reading.pop().result()
                reading = begin(position + 1)  # the part before this one is in use no more
                _require_the_same_bytes(loaded, dist)
                yield loaded
                loaded.empty()
        finally:
            stop.set()


def _require_the_same_bytes(loaded: LoadedTensors, dist: ProcessGroup) -> None:
    """Compare a part's hashes with those of rank 0."""
    if not dist.is_distributed:
        return
    first = dist.broadcast_object(loaded.hashes)
    for name, digest in loaded.hashes.items():
        if first[name] != digest:
            raise CheckpointError(
                f"{dist.name}: {loaded.tensors[name].file}: {name} has other bytes than on the machine of "
                "rank 0; copy the source there again"
            )


def broadcast_tensors(loaded: LoadedTensors | None, dist: ProcessGroup) -> LoadedTensors:
    """Rank 0's part in every process; the others, which call this with None, get it in memory of their own."""
    import torch

    specs = loaded and {tensor: (info.dtype, info.shape) for tensor, info in loaded.tensors.items()}
    specs, folder, name, config = dist.broadcast_object(loaded and (specs, loaded.folder, loaded.name, loaded.config))
    if loaded is None:
        stored = {tensor: torch.empty(shape, dtype=torch_dtype(dtype)) for tensor, (dtype, shape) in specs.items()}
        loaded = tensors_in_memory(LoadedTensors(folder, name, config, {}), stored, folder)
    for tensor in specs:
        dist.broadcast(loaded.stored[tensor])
    return loaded
