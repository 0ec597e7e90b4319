"""One visit a layer: what all models that are compared do there, side by side.

The source's bytes of a layer are read once. Its weights are materialised, and take the held-out texts one layer on;
whoever makes a layer of its own from them does so now. Then, one after the other, each candidate's weights are
materialised, take its own texts on, and what leaves the layer is compared with what left the source's.

A *lane* is one model's way through the layers, the source's the first. `quantize run` has one candidate, which is
made on the way (quantized.py); the candidates of `quantize eval` lie in files (measure.py). Anything else that is to
be compared with a source is one more candidate, not another loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from eval.fidelity.compare import compare
from eval.fidelity.figures import Text
from quantizers.checkpoint.ahead import held_ahead
from quantizers.checkpoint.held import Held, layer_names
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.allocator import release_free_memory
from quantizers.device.kind import accelerated
from quantizers.device.pinned import pin
from quantizers.forward.lane import Lane
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import doing
from quantizers.team.team import ALONE, Team

from .brought import Brought


class Watch:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under this phase."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass
class Visit:
    """The work on one layer.

    Attributes:
        number: of the layer.
        source: its tensors, as read from the source.
        there: the same tensors on the device; on a CPU the same memory.
        watch: seconds by phase.
        compared: for each candidate what `compare` found; empty without texts.
    """

    number: int
    source: Held
    there: Held
    watch: Watch = field(default_factory=Watch)
    compared: list[dict[str, Any]] = field(default_factory=list)


class Candidate(Protocol):
    """A model that is compared with the source, layer by layer."""

    lane: Lane
    keeps_attention: bool  # whether all before the norm is the source's own

    def prepare(self, visit: Visit, layer: torch.nn.Module) -> None:
        """Called while `layer` holds the source's weights but those of its experts; they are to be left as they are."""

    def layer(self, visit: Visit) -> AbstractContextManager[torch.nn.Module]:
        """The layer with the candidate's weights, within the block."""


def visits(
    source: Checkpoint,
    reference: Lane,
    candidates: Sequence[Candidate],
    texts: Sequence[Text],
    done: int,
    *,
    check: Callable[[], None] = lambda: None,
    team: Team = ALONE,
    early: bool = False,
) -> Generator[Visit]:
    """Visit the layers in their order, from layer `done` on.

    Args:
        source: the whole checkpoint, from which each layer is read once.
        reference: the source's lane; its states, like those of all candidates, are those that enter layer `done`.
        texts: of the lanes; there may be none.
        check: called between steps; may raise to interrupt.
        team: the processes that share the work.
        early: whether there is room on the device for the next layer's bytes, which then cross while one is worked on.
            (Of several processes on a machine each has read only a share of them by then.)

    Yields:
        Each visit once all lanes have passed through the layer. Its tensors are valid until the next one is asked for.
        Whoever has kept what is to be kept of a layer tells the lanes to forget the states that entered it. Close the
        iterator to stop reading ahead.

    Raises:
        QuantizeError: an output is not finite, or the device's memory is full.
    """
    model = reference.model
    parts = [layer_names(source, model.facts, number) for number in range(done, model.sizes["layers"])]
    brought = Brought(model.device, early=early and accelerated(model.device) and not team.here.several)

    def prepare(buffer: torch.Tensor) -> None:
        pin(buffer, model.device)
        brought.make_room(buffer)

    with contextlib.ExitStack() as stack:
        stack.callback(brought.give_up)  # once nothing is read ahead any more
        ahead = stack.enter_context(contextlib.closing(held_ahead(source, parts, team, prepare, brought.begin)))
        for number in range(done, model.sizes["layers"]):
            check()
            doing("reading")
            watch = Watch()
            source = next(ahead)
            watch.lap("read")
            with device_memory_errors(number):
                visit = Visit(number, source, brought.take(source), watch)
                pass_through(visit, reference, candidates, texts, team)
            del source
            yield visit
            # Who asked may still hold the visit, while the next bytes are read.
            visit.source = visit.there = visit.source.only(())
            release_free_memory()


def pass_through(
    visit: Visit, reference: Lane, candidates: Sequence[Candidate], texts: Sequence[Text], team: Team = ALONE
) -> None:
    """All that one visit does once its bytes are there, see `visits`."""
    number, watch = visit.number, visit.watch
    # Its experts are needed for texts alone: whoever makes a layer from them reads them unit by unit, as stored.
    with reference.model.layer(number, visit.there, experts=bool(texts)) as layer:
        watch.lap("materialise")
        if texts:
            doing("held-out texts")
            reference.attend(number, layer)
            for candidate in candidates:
                if _shares_attention(candidate, number):
                    candidate.lane.attend_as(reference, number)
            reference.finish(number, layer)
            if number not in reference.model.sizes.dense:
                reference.model.release_experts(layer)
            watch.lap("reference")
        for candidate in candidates:
            candidate.prepare(visit, layer)
    for candidate in candidates:
        with candidate.layer(visit) as layer:
            if texts:
                doing("held-out texts")
                if not _shares_attention(candidate, number):
                    candidate.lane.attend(number, layer)
                candidate.lane.finish(number, layer)
                watch.lap("candidate")
        if texts:
            doing("comparing")
            routed = number not in reference.model.sizes.dense
            visit.compared.append(compare(reference, candidate.lane, texts, routed=routed, team=team))
            watch.lap("compare")


def _shares_attention(candidate: Candidate, number: int) -> bool:
    """Whether a candidate's attention would compute what the source's did: only the first layer's inputs are equal."""
    return candidate.keeps_attention and number == 0


@contextlib.contextmanager
def device_memory_errors(number: int) -> Iterator[None]:
    """Turn a full device, while layer `number` is worked on, into a line that says how to go on."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise QuantizeError(
            f"layer {number}: the device's memory is full; give the same command again with a smaller --device-memory, "
            "and the run goes on"
        ) from None
