"""The walk over a checkpoint's layers: each is read once, the next one while the caller works on this one.

with walk(source, tensors, model) as steps:
    for step in steps:
        with step.module() as layer:      # transformers' layer with the source's weights, proven
            states.advance(layer)
            step.release_experts(layer)   # attention, norms and router stay: this is where a layer is solved
        ...                               # the module is freed, the stored tensors are still there
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, prefetched_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator, release_free_memory
from quantizers.device.prefetch import BufferPrefetch, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.model.proof import Proof
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.job import Job
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import doing


class Watch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to this phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass
class LayerStep:
    """The work on one layer: the source's stored tensors, and transformers' module with them while it is asked for.

    Attributes:
        source: the layer's tensors on the host, as read from the source.
        on_device: the same tensors on the device; on a CPU the same memory.
        model: the source; None where only bytes are walked over.
        prover: proves the layer when its module is first made; None for no proof.
        proof: how far the layer's output is from transformers' own, see `Proof`; None before.
    """

    number: int
    source: LoadedTensors
    on_device: LoadedTensors
    model: StreamedModel | None
    prover: Proof | None = None
    watch: Watch = field(default_factory=Watch)
    proof: float | None = None

    @contextlib.contextmanager
    def module(self, *, experts: bool = True) -> Iterator[DecoderLayer]:
        """The decoder layer with the source's weights, which are freed when the block ends.

        Args:
            experts: False leaves the routed experts' weights out: attention, norms and router alone can be computed.

        Raises:
            ArchitectureError: the layer is not computed as transformers computes it.
            CheckpointError: a tensor is wrong.
        """
        assert self.model is not None, "a walk without a model has no modules"
        with self.model.layer(self.number, self.on_device, experts=experts) as layer:
            self.watch.lap("materialise")
            if self.prover is not None and self.proof is None:
                self.proof = self.prover.of_layer(layer)
            yield layer

    def release_experts(self, layer: DecoderLayer) -> None:
        """Free the weights of the layer's routed experts, if it has any."""
        assert self.model is not None
        if layer.number not in self.model.facts.dense:
            self.model.release_experts(layer)


@contextlib.contextmanager
def walk(
    source: Checkpoint,
    tensors: Mapping[int, Sequence[str]],
    model: StreamedModel | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    dist: ProcessGroup = SINGLE_PROCESS,
    early: bool = False,
) -> Iterator[Iterator[LayerStep]]:
    """The steps over a source's layers, in their order, within a block; when it ends, nothing is read ahead any more.

    A step's tensors are valid until the next step is asked for.

    Args:
        tensors: the names of the tensors to read, by the layer's number, in the order of the layers.
        model: the source's structure and device; None to have each layer's bytes alone, on the CPU.
        check: called between layers; may raise to interrupt.
        early: whether there is room on the device for the next layer's bytes, which are then prefetched.

    Raises:
        QuantizeError: the device's memory is full, in reading or within the block.
        CheckpointError: a layer cannot be read.
    """
    device = torch.device("cpu") if model is None else model.device
    early = early and is_accelerator(device)
    prefetch = BufferPrefetch(device)
    prover = None if model is None else Proof(model)
    current = 0

    def prepare(buffer: torch.Tensor) -> None:
        pin(buffer, device)
        if early:
            prefetch.allocate(buffer)

    def arrived(loaded: LoadedTensors) -> None:
        if early and loaded.buffer is not None:
            prefetch.begin(loaded.buffer)

    def steps(loading: Iterator[LoadedTensors]) -> Iterator[LayerStep]:
        nonlocal current
        for current in tensors:
            check()
            doing("reading")
            watch = Watch()
            loaded = next(loading)
            watch.lap("read")
            on_device = loaded.to(device, prefetch.take() if early else None)
            step = LayerStep(current, loaded, on_device, model, prover, watch)
            del loaded, on_device
            yield step
            if model is not None and (tables := model.facts.in_tables(current)):
                dist.barrier()  # others may still look rows up
                source.release(name for name in tables if name in source.tensors)
            # The caller may keep the step while the next bytes are read.
            step.source = step.on_device = step.source.only(())
            release_free_memory()

    with contextlib.ExitStack() as stack:
        stack.callback(prefetch.stop)  # once nothing is read ahead any more
        loading = prefetched_tensors(source, list(tensors.values()), dist, prepare, arrived)
        stack.enter_context(contextlib.closing(loading))
        try:
            yield steps(loading)
        except torch.OutOfMemoryError:
            raise memory_is_full(current) from None


def all_tensors(model: StreamedModel | Job, source: Checkpoint, first: int = 0) -> dict[int, list[str]]:
    """The names of all tensors of each layer from `first` on, by the layer's number."""
    return {number: layer_names(source, model.facts, number) for number in range(first, model.facts.num_layers)}


def memory_is_full(number: int) -> QuantizeError:
    """The error for a device that ran out of memory at layer `number`."""
    return QuantizeError(
        f"layer {number}",
        "the device's memory is full",
        "give the same command again with a smaller --device-memory, and the run resumes",
    )
