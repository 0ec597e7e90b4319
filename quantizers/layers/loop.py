"""The loop over a checkpoint's layers: each is read once, the next one while its consumers work on it; and resuming."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from quantizers.checkpoint.loaded_tensors import (
    LoadedTensors,
    broadcast_tensors,
    layer_names,
    load_tensors,
    prefetched_tensors,
)
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.devices import is_accelerator, release_free_memory
from quantizers.device.prefetch import BufferPrefetch, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.model.proof import Proof
from quantizers.model.streamed_model import StreamedModel
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import doing

from .step import Consumer, LayerStep, Watch, run_step


def layer_steps(
    source: Checkpoint,
    tensors: Mapping[int, Sequence[str]],
    consumers: Sequence[Consumer],
    model: StreamedModel | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    dist: ProcessGroup = SINGLE_PROCESS,
    early: bool = False,
) -> Generator[LayerStep]:
    """Call the consumers layer by layer.

    Args:
        tensors: the names of the tensors to read, by the layer's number, in the order of the layers.
        consumers: called in this order at each place of a step, see `Consumer`.
        model: the source's structure and device; None if the consumers need bytes alone, on the CPU.
        check: called between layers; may raise to interrupt.
        early: whether there is room on the device for the next layer's bytes, which are then prefetched.

    Yields:
        Each step after its consumers. Its tensors are valid until the next one is asked for. Close the iterator to
        stop reading ahead.

    Raises:
        QuantizeError: an output is not finite, or the device's memory is full.
        CheckpointError: a layer cannot be read.
        ArchitectureError: a layer is not computed as transformers computes it.
    """
    device = torch.device("cpu") if model is None else model.device
    early = early and is_accelerator(device)
    prefetch = BufferPrefetch(device)
    computes = model is not None and any(consumer.needs != "bytes" for consumer in consumers)
    proof = Proof(model) if model is not None and computes else None

    def prepare(buffer: torch.Tensor) -> None:
        pin(buffer, device)
        if early:
            prefetch.allocate(buffer)

    def arrived(part: LoadedTensors) -> None:
        if early and part.buffer is not None:
            prefetch.begin(part.buffer)

    with contextlib.ExitStack() as stack:
        stack.callback(prefetch.stop)  # once nothing is read ahead any more
        parts = prefetched_tensors(source, list(tensors.values()), dist, prepare, arrived)
        loading = stack.enter_context(contextlib.closing(parts))
        for number in tensors:
            check()
            doing("reading")
            watch = Watch()
            loaded = next(loading)
            watch.lap("read")
            with device_memory_errors(number):
                on_device = loaded.to(device, prefetch.take() if early else None)
                step = LayerStep(number, loaded, on_device, watch)
                del on_device
                run_step(step, model, consumers, proof)
            del loaded
            yield step
            # The caller may keep the step while the next bytes are read.
            step.source = step.on_device = step.source.only(())
            release_free_memory()


def all_tensors(model: StreamedModel, source: Checkpoint, first: int = 0) -> dict[int, list[str]]:
    """The names of all tensors of each layer from `first` on, by the layer's number."""
    return {number: layer_names(source, model.facts, number) for number in range(first, model.sizes["layers"])}


@contextlib.contextmanager
def device_memory_errors(number: int) -> Iterator[None]:
    """Turn an out-of-memory error at layer `number` into a line that says how to resume."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise QuantizeError(
            f"layer {number}: the device's memory is full; give the same command again with a smaller --device-memory, "
            "and the run resumes"
        ) from None


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

    `follow` takes the states through a layer; `make_again` first solves one whose shard is damaged once more.
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
    """The tensors of a finished shard of `source`'s copy, which rank 0 reads from its file and passes on."""
    loaded = None
    if dist.is_main:
        tensors = read_header(shard)
        loaded = load_tensors(Checkpoint(shard.parent, source.name, source.config, tensors), tensors)
    return broadcast_tensors(loaded, dist)
