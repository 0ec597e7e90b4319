"""The loop over a checkpoint's layers: each is read once, the next one while its consumers work on it.

At each layer there is a step, and the consumers are who takes part in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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

Need = Literal["attention", "experts"]


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
    """The work on one layer."""

    number: int
    source: LoadedTensors  # on the host, as read from the source
    on_device: LoadedTensors  # the same tensors; on a CPU the same memory
    watch: Watch = field(default_factory=Watch)
    proof: float | None = None  # how far the layer's output is from transformers' own, if it is computed, see `Proof`


class Consumer:
    """One use of the loop over the layers: quantizing, comparing, counting routes, measuring schemes.

    The loop (`layer_steps`) reads the source's bytes of each layer once. At each layer every process calls every
    consumer, in the order in which they were given, at three fixed places:

        source_layer(step, layer)      `layer` is the decoder layer with all of the source's weights
        without_experts(step, layer)   the same module; the routed experts' weights are freed, attention, norms and
                                       router are there: this is where a layer is solved
        after_source(step)             the module is freed; the source's stored tensors are still there: this is where
                                       other versions of the layer are made and run

    Then the loop yields the step, so that its caller writes a journal or shows progress. A use is a class with those
    methods that it needs; the inherited ones do nothing. Consumers own their states: the loop carries none from one
    layer to the next.

    Attributes:
        needs: what the loop prepares: `attention` for the module without its experts' weights, `experts` for all of it;
            only then is it called with `source_layer`.
    """

    needs: Need

    def source_layer(self, step: LayerStep, layer: DecoderLayer) -> None:
        """The layer with all of the source's weights."""

    def without_experts(self, step: LayerStep, layer: DecoderLayer) -> None:
        """The layer without the weights of its experts, which are to be left as they are."""

    def after_source(self, step: LayerStep) -> None:
        """The source's module is freed, its stored tensors are loaded."""


def run_step(
    step: LayerStep, model: StreamedModel | None, consumers: Sequence[Consumer], proof: Proof | None = None
) -> None:
    """Call the consumers at their places, with the source's model if it is given.

    Before they compute anything the layer is proven, unless it is already; an ArchitectureError if it cannot be.
    """
    with_experts = [consumer for consumer in consumers if consumer.needs == "experts"]
    if model is not None:
        with model.layer(step.number, step.on_device, experts=bool(with_experts)) as layer:
            step.watch.lap("materialise")
            step.proof = proof.of_layer(layer) if proof else None
            for consumer in with_experts:
                consumer.source_layer(step, layer)
            if with_experts and step.number not in model.facts.dense:
                model.release_experts(layer)
            for consumer in consumers:
                consumer.without_experts(step, layer)
    for consumer in consumers:
        consumer.after_source(step)


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
        model: the source's structure and device; None to have each layer's bytes alone, on the CPU.
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
    proof = None if model is None else Proof(model)

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


def all_tensors(model: StreamedModel | Job, source: Checkpoint, first: int = 0) -> dict[int, list[str]]:
    """The names of all tensors of each layer from `first` on, by the layer's number."""
    return {number: layer_names(source, model.facts, number) for number in range(first, model.facts.num_layers)}


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
