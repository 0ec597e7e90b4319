"""The layer step: what happens to one decoder layer while its bytes are loaded, and who takes part in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from quantizers.checkpoint.loaded_tensors import LoadedTensors
from quantizers.model.proof import Proof
from quantizers.model.streamed_model import DecoderLayer, StreamedModel

Need = Literal["bytes", "attention", "experts"]


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

    The loop (`loop.layer_steps`) reads the source's bytes of each layer once. At each layer every process calls every
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
        needs: what the loop prepares: `bytes` for the stored tensors alone, `attention` for the module without its
            experts' weights, `experts` for all of it. Only a consumer that needs `experts` is called with
            `source_layer`, and none that needs `bytes` with `without_experts`.
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
    """Call the consumers at their places, with the source's model unless they need bytes alone.

    Before they compute anything the layer is proven, unless it is already; an ArchitectureError if it cannot be.
    """
    with_experts = [consumer for consumer in consumers if consumer.needs == "experts"]
    with_attention = [consumer for consumer in consumers if consumer.needs != "bytes"]
    if with_attention:
        assert model is not None
        with model.layer(step.number, step.on_device, experts=bool(with_experts)) as layer:
            step.watch.lap("materialise")
            step.proof = proof.of_layer(layer) if proof else None
            for consumer in with_experts:
                consumer.source_layer(step, layer)
            if with_experts and step.number not in model.sizes.dense:
                model.release_experts(layer)
            for consumer in with_attention:
                consumer.without_experts(step, layer)
    for consumer in consumers:
        consumer.after_source(step)
