"""The parts of a checkpoint one after the other, each read ahead of its use.

While one part is in use, a thread reads the next, so at most two are in memory. Two buffers take turns for all parts:
fresh memory for a layer of 3.6 GB would cost a page fault for each 4 KiB, a million a layer. So a part's tensors are
valid until the next part is asked for. It is emptied then, and has no tensor any more.

Several processes each read all parts, on a machine most of them from the page cache, and compare their hashes, since
machines have copies of their own. A finished shard, which rank 0 alone has, it broadcasts.
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

    A part's tensors are valid until the next part is asked for: then the part is emptied, since its memory gets the
    bytes of the part after the next. Who reads in the background must be done with it by then.

    Args:
        parts: the names of each part's tensors.
        dist: who asks for the same parts; each of them has the checkpoint on its machine.
        prepare: called with each of the two buffers, once, before anything is read.
        arrived: called by the thread with each part as it has been read.

    Raises:
        CheckpointError: as `hold`, when the part's turn comes; or this process has read other bytes than
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
            held = load_tensors(checkpoint, parts[position], stop, buffers[position % 2])
            if not stop.is_set():
                arrived(held)
            return held

        def begin(position: int) -> list[Future[LoadedTensors]]:
            return [pool.submit(read, position)] if position < len(parts) else []

        try:
            reading = begin(0)
            for position in range(len(parts)):
                held = reading.pop().result()
                reading = begin(position + 1)  # nobody reads the part before this one any more
                _require_the_same_bytes(held, dist)
                yield held
                held.empty()
        finally:
            stop.set()


def _require_the_same_bytes(held: LoadedTensors, dist: ProcessGroup) -> None:
    """Compare a part with what rank 0 has read, by hash.

    Raises:
        CheckpointError: this process has read other bytes.
    """
    if not dist.is_distributed:
        return
    first = dist.broadcast_object(held.hashes)
    for name, digest in held.hashes.items():
        if first[name] != digest:
            raise CheckpointError(
                f"{dist.name}: {held.tensors[name].file}: {name} has other bytes than on the machine of "
                "rank 0; copy the source there again"
            )


def broadcast_tensors(held: LoadedTensors, dist: ProcessGroup) -> LoadedTensors:
    """Give the other processes a part, which they get from `received_tensors`; returns it."""
    dist.broadcast_object({name: (info.dtype, info.shape) for name, info in held.tensors.items()})
    dist.broadcast_object((held.folder, held.name, held.config))
    for name in held.tensors:
        dist.broadcast(held.stored[name])
    return held


def received_tensors(dist: ProcessGroup) -> LoadedTensors:
    """The part that rank 0 passes on, in memory of its own."""
    import torch

    specs = dist.broadcast_object()
    folder, name, config = dist.broadcast_object()
    stored = {name: torch.empty(shape, dtype=torch_dtype(dtype)) for name, (dtype, shape) in specs.items()}
    for tensor in stored.values():
        dist.broadcast(tensor)
    return tensors_in_memory(LoadedTensors(folder, name, config, {}), stored, folder)
