"""Resuming: states go through the layers that an earlier call finished, as these are stored in their shards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from quantizers.checkpoint.loaded_tensors import LoadedTensors, load_tensors
from quantizers.checkpoint.prefetch import broadcast_tensors, received_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.devices import release_free_memory
from quantizers.distributed.process_group import ProcessGroup, rank_0_progress

from .loop import device_memory_errors


def resume_layers(
    layers: int,
    damaged: Collection[int],
    *,
    follow: Callable[[int], None],
    make_again: Callable[[int], None],
    check: Callable[[], None],
    dist: ProcessGroup,
) -> None:
    """Go through the first `layers` layers in their order, which an earlier call finished.

    Args:
        damaged: those whose shards must be made again.
        follow: takes the states through a finished layer.
        make_again: solves a damaged layer once more, and takes the states through it.
    """
    if not layers:
        return
    with rank_0_progress("resuming", layers, 0, check, dist) as step:
        for number in range(layers):
            with device_memory_errors(number):
                (make_again if number in damaged else follow)(number)
            release_free_memory()
            step(f"layer {number}")


def finished_shard(source: Checkpoint, shard: Path, dist: ProcessGroup) -> LoadedTensors:
    """The tensors of a finished shard, which rank 0 reads from its file and passes on.

    Args:
        source: gives name and config.
    """
    if not dist.is_main:
        return received_tensors(dist)
    tensors = read_header(shard)
    return broadcast_tensors(load_tensors(Checkpoint(shard.parent, source.name, source.config, tensors), tensors), dist)
