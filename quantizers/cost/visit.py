"""The visit to one layer, counted: what `quantize run` does there, on an accelerator that is not there.

It is the run's own code (layers/step.py, run/quantizer.py) with a model, lanes and a candidate whose tensors have no
numbers. What a run does in the background is not done and only its bytes are known: reading and hashing the source,
writing the shard, reading it back. Whatever is repeated with the same shapes is done once and counted as often as it
happens: for units of experts, blocks of rows, sequences of the same length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from eval.fidelity.comparison import Comparison, OfText
from eval.fidelity.metrics import Text
from quantizers.checkpoint.held import Held
from quantizers.checkpoint.safetensors_header import TensorInfo
from quantizers.checkpoint.tensor_bytes import torch_dtype
from quantizers.device import crossing, rough
from quantizers.device.devices import forward_dtype
from quantizers.device.pinned import pin
from quantizers.device.timing import listening
from quantizers.forward.lane import Lane
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import Recorded
from quantizers.forward.states import Rows
from quantizers.layers import calibration_states
from quantizers.layers.brought import Brought
from quantizers.layers.step import LayerStep, Watch, run_step
from quantizers.layers.writer import ShardWriter
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.plan.solve_memory import DeviceMemory
from quantizers.run.quantizer import Quantizer
from quantizers.solve import expert_sums, expert_unit, input_sums, norm_search, token_weights
from quantizers.system.residents import Residents
from quantizers.team.team import Team

from .copies import CountedStream
from .counted_team import ALONE, CountedTeam, Ranks, busiest
from .counting import Counting
from .one_kernel import OneKernel
from .routing import SPREAD, answer, of_units, routed_rows
from .values import META, untouched
from .work import Work

Result = TypeVar("Result")
NOWHERE = Path("counted")  # nothing is written there
# What units of experts and blocks of rows repeat with the same shapes.
REPEATED = (
    (expert_unit, "_round"),
    (expert_unit, "_width_scale"),
    (expert_unit, "corrected"),
    (input_sums, "_add_routed"),
    (expert_sums, "_add_block"),
    (token_weights, "_of_block"),
    (norm_search, "scale_losses"),
    (norm_search, "rough_losses"),
)


@dataclass(frozen=True)
class CountedVisit:
    """What a visit costs.

    Attributes:
        phases: of the device's work, in their order.
        source, shard: bytes of the layer as it is read and as it is written.
    """

    phases: Mapping[str, Work]
    source: int
    shard: int

    @property
    def peak(self) -> int:
        """The most bytes that are alive on the device."""
        return max(work.peak for work in self.phases.values())


def count_visit(
    job: Job,
    number: int,
    lengths: Sequence[int],
    texts: Sequence[Text],
    memory: DeviceMemory,
    ranks: Ranks = ALONE,
    capability: tuple[int, int] | None = None,
    spread: float = SPREAD,
) -> CountedVisit:
    """Count a visit to one layer.

    Args:
        job: its source need not be there.
        number: of the layer.
        lengths: calibration tokens of each sequence.
        texts: held-out texts; only their lengths matter.
        memory: what is held on the device.
        ranks: the processes that share the work; counted is the one that has most to do.
        capability: of the card, see device/rough.py; None for one on which nothing is ranked roughly.
        spread: see routing.py.

    Raises:
        QuantizeError: an operation whose sum has no order on a GPU.
    """
    routed = routed_rows(job.sizes, sum(lengths), spread)
    counting = Counting(answer(routed))
    source = _untouched_source(job, [action.source for action in job.plan.of_layer(number)])
    model = CountedModel(job, counting)
    tokens, team = [len(text.tokens) for text in texts], Team()
    if ranks.count > 1:
        rank = busiest(ranks, of_units(routed, memory.unit), job.sizes["chosen"], tokens)
        team = CountedTeam(counting, ranks, rank, job.sizes["experts"])
    with torch.no_grad(), counting, listening(counting), _once(counting, capability):
        texts_there = META if memory.texts else None
        lanes = [
            _Lane(str(n), model, n, tokens, NOWHERE, durable=True, team=team, device=texts_there) for n in range(2)
        ]
        context = Context(
            NOWHERE,
            META,
            Residents(memory.resident, memory.unit, memory.smallest),
            team=team,
            inputs="device" if memory.inputs else "memory",
            states="device" if memory.states else "memory",
        )
        laps = _Laps(counting)
        candidate = Quantizer(job, model, lanes[1], context, lengths, writer=_Writer(laps))
        for lane in lanes:
            lane.left = lane.states(number)
        counting.lap("begin")
        brought = _brought(source, memory)
        # Read, and on its way, while the experts of the layer before it were solved.
        with counting.block("rounding") if memory.early else contextlib.nullcontext():
            there = brought.take(source)
        step = LayerStep(number, source, there, laps)
        counting.lap("read")
        run_step(step, model, [Comparison(lanes[0], [candidate], texts, _Comparing(len(texts)))])
        candidate.entry(step)
    phases = {name: work for name, work in counting.phases.items() if name != "begin"}
    shard = sum(spec.bytes for spec in job.plan.shard(number).values())
    return CountedVisit(phases, sum(info.size for info in source.tensors.values()), shard)


def texts_of(lengths: Sequence[int]) -> list[Text]:
    """Texts of these lengths without tokens of their own; those that are longer than the shortest count as long."""
    shortest = min(lengths, default=0)
    return [Text(torch.zeros(length, dtype=torch.int64), "counted", 1, length > shortest) for length in lengths]


@contextlib.contextmanager
def _once(counting: Counting, capability: tuple[int, int] | None) -> Iterator[None]:
    """What is repeated with the same shapes is done once; copies are counted, and a card's capability is known."""
    stream = CountedStream(counting)
    with contextlib.ExitStack() as stack:
        for module, name in REPEATED:
            stack.enter_context(patch.object(module, name, counting.once(getattr(module, name))))
        stack.enter_context(patch.object(calibration_states, "rows_in_common", _in_memory))
        stack.enter_context(patch.object(crossing, "stream_of", lambda _: stream))
        stack.enter_context(patch.object(rough, "capability", lambda _: capability))
        yield


def _untouched_source(job: Job, names: Sequence[str]) -> Held:
    """Tensors of the source in one buffer, as a layer arrives; of zeros, in memory that nobody has touched."""
    specs = {action.source: action.spec for action in job.plan.actions}
    infos: dict[str, TensorInfo] = {}
    start = 0
    for name in names:
        infos[name] = TensorInfo(name, specs[name].dtype, specs[name].shape, NOWHERE, start, start + specs[name].bytes)
        start += -(-specs[name].bytes // 8) * 8
    buffer = untouched((start,), torch.uint8)
    pin(buffer, META)
    stored = {
        name: buffer[info.start : info.end].view(torch_dtype(info.dtype)).view(info.shape)
        for name, info in infos.items()
    }
    return Held(NOWHERE, "counted", job.config, infos, None, stored, dict.fromkeys(infos, ""), buffer)


def _brought(source: Held, memory: DeviceMemory) -> Brought:
    """What brings the layer to the device; with room for the next one there, if that crosses meanwhile."""
    brought = Brought(META, early=memory.early)
    assert source.buffer is not None
    for _ in range(2):
        brought.make_room(source.buffer)
    brought.begin(source)
    return brought


class _Laps(Watch):
    """Tells the counter of every lap."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def lap(self, phase: str) -> None:
        super().lap(phase)
        self._counting.lap(phase)


class CountedModel(LayeredModel):
    """Layers whose weights are freed when their block ends, as a GPU's are when a module goes back to the meta device.

    Args:
        job: its source need not be there.
    """

    def __init__(self, job: Job, counting: Counting) -> None:
        super().__init__(
            _untouched_source(job, [job.facts.final_norm]), job.facts, job.sizes, META, forward_dtype(META)
        )
        self.layer_class = counting.beside(self.layer_class)
        self._counting = counting

    @contextlib.contextmanager
    def layer(self, number: int, stored: Any = None, *, experts: bool = True) -> Iterator[torch.nn.Module]:
        with super().layer(number, stored, experts=experts) as layer:
            yield layer
        _forget(layer)

    def release_experts(self, layer: torch.nn.Module) -> None:
        _forget(layer.get_submodule(self.facts.modules.experts))

    def attend(self, layer: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
        with OneKernel(self._counting):
            return self._once(partial(super().attend, layer), "attend")(states)

    def route(self, layer: torch.nn.Module, residual: torch.Tensor) -> Recorded:
        return self._once(partial(super().route, layer), "route")(residual)

    def finish(self, layer: torch.nn.Module, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._once(partial(super().finish, layer), "finish")(residual)

    def _once(self, half: Callable[[torch.Tensor], Result], name: str) -> Callable[[torch.Tensor], Result]:
        """Once for rows of each number: the layer has the same shapes in all lanes."""
        return self._counting.once(half, name)


def _forget(module: torch.nn.Module) -> None:
    for part in module.modules():
        part._parameters.clear()


class _Lane(Lane):
    """Held-out states on the device or in the host's memory; of their files the copy to them is all that is counted."""

    def _rows(self, name: str, width: int, dtype: torch.dtype) -> Rows:
        return self._at(None, width, dtype)

    def _keep(self, layer: int) -> None:
        self.left.flat.cpu()


def _in_memory(_: Context, lengths: Sequence[int], __: str, width: int, dtype: torch.dtype) -> Rows:
    """Memory that the processes of a machine have in common; one copy of it, whoever has made it."""
    rows = Rows(None, lengths, width, dtype)
    pin(rows.flat, META)
    return rows


class _Comparing(Team):
    """Other processes that have compared their texts."""

    def __init__(self, texts: int) -> None:
        self._texts = texts

    def collect(self, value: Any) -> list[Any]:
        return [dict.fromkeys(range(self._texts), OfText(0.0, 0.0, 1.0))]


class _Writer(ShardWriter[Any, Any]):
    """Writes nothing, and audits what would be written, if it is this process's turn."""

    ahead = 0

    def __init__(self, laps: _Laps) -> None:
        self._laps = laps

    def has_turn(self, number: int) -> bool:
        return True

    def begin(self, number: int, audit: Callable[[], Any], store: Callable[[], Any]) -> None:
        self._laps.lap("pack")
        audit()
        self._laps.lap("audit")
