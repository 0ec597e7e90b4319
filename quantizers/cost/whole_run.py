"""A whole run, counted: a visit to a layer of each kind, as often as there are such, and the scoring at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eval.fidelity import scoring
from eval.fidelity.metrics import Text
from quantizers.checkpoint.tensor_bytes import torch_dtype
from quantizers.plan.job import Job
from quantizers.plan.solve_memory import DeviceMemory
from quantizers.system.progress import progress

from .counted_team import ALONE, Ranks, own_texts
from .counting import Counting
from .seconds import DISK, Device, layer_seconds, proving_seconds, reading_seconds, writing_seconds
from .values import META, untouched
from .visit import CountedModel, CountedVisit, count_visit
from .work import Work

_counted: dict[Any, CountedVisit] = {}  # by all that a count follows from


@dataclass(frozen=True)
class CountedRun:
    """What a run costs.

    Attributes:
        routed, dense: the visit to a layer with experts, and to one without; None where there is none.
        layers: how many there are of each.
        scoring: the device's work on held-out texts after the last layer.
        around: bytes of what lies outside the layers, and of layers that are only copied.
        output: bytes of the finished checkpoint.
        ranks: the processes that share the work; phases and scoring are those of one of them.
    """

    routed: CountedVisit
    dense: CountedVisit | None
    layers: tuple[int, int]
    scoring: Mapping[str, Work]
    around: int
    output: int
    ranks: Ranks = ALONE

    @property
    def visits(self) -> list[tuple[CountedVisit, int]]:
        """Each kind of visit, and how often it is made."""
        return [(visit, times) for visit, times in zip((self.routed, self.dense), self.layers, strict=True) if visit]

    @property
    def peak(self) -> int:
        """The most bytes that are alive on the device."""
        return max(*(visit.peak for visit, _ in self.visits), *(work.peak for work in self.scoring.values()), 0)

    def flops(self) -> int:
        """Multiplications and additions of the whole run."""
        layers = sum(sum(w.flops.values()) * times for visit, times in self.visits for w in visit.phases.values())
        return layers + sum(sum(work.flops.values()) for work in self.scoring.values())

    def seconds(self, device: Device, disk: float = DISK) -> dict[str, float]:
        """How long it takes: `layers`, `proof`, and `all` for their sum.

        Args:
            disk: bytes a second that are read from or written to files.
        """
        around, last_reading = self.by_one_process(device, disk)
        layers = sum(layer_seconds(visit, device, self.ranks, disk).layer * times for visit, times in self.visits)
        proof = sum(device.seconds(work) for work in self.scoring.values()) + last_reading
        return {"layers": layers + around, "proof": proof, "all": layers + around + proof}

    def by_one_process(self, device: Device, disk: float = DISK) -> tuple[float, float]:
        """Seconds that rank 0 works alone: on what lies around the layers, and on the last reading."""
        around = reading_seconds(self.around, disk, device.readers) + writing_seconds(self.around, disk, device.readers)
        return around, proving_seconds(self.output, disk, device.readers)


def count_run(
    job: Job,
    lengths: Sequence[int],
    texts: Sequence[Text],
    memory: DeviceMemory,
    output: int,
    ranks: Ranks = ALONE,
    capability: tuple[int, int] | None = None,
) -> CountedRun:
    """Count a run of this job.

    Args:
        lengths: calibration tokens of each sequence.
        texts: held-out texts; only their lengths matter.
        memory: what is held on the device.
        output: bytes of the finished checkpoint.
        ranks: the processes that share the work.
        capability: see `count_visit`.
    """
    dense, moe = sorted(job.sizes.dense), job.sizes.moe_layers
    first: list[CountedVisit] = []
    numbers = (moe[0], *dense[:1])
    with progress("counting", len(numbers) + bool(texts)) as step:
        for number in numbers:
            first.append(_visit(job, number, lengths, texts, memory, ranks, capability))
            step(f"layer {number}")
        tokens = [len(text.tokens) for text in texts]
        shares = (own_texts(ranks, rank, tokens) for rank in range(ranks.count))
        own = max(shares, key=lambda share: sum(tokens[i] for i in share))
        scoring = count_scoring(job, [texts[i] for i in own]) if own else {}
        if texts:
            step("held-out texts")
    around = sum(a.spec.bytes for a in job.plan.actions if a.layer is None or a.layer in job.plan.mtp)
    return CountedRun(first[0], first[1] if dense else None, (len(moe), len(dense)), scoring, around, output, ranks)


def count_scoring(job: Job, texts: Sequence[Text]) -> dict[str, Work]:
    """Count what is done with held-out texts that have left the last layer of the source and of the output."""
    counting = Counting()
    model = CountedModel(job, counting)
    (head,) = (action.spec for action in job.plan.of_layer(None) if action.source == job.facts.head)
    scored = counting.once(scoring.score_text)
    with torch.no_grad(), counting:
        matrix = untouched(head.shape, torch_dtype(head.dtype)).to(META).to(model.dtype)
        for text in texts:
            states = [untouched((len(text.tokens), job.sizes["hidden"]), model.dtype) for _ in range(2)]
            scored([(model, matrix)] * 2, text.tokens, states)
        counting.lap("scoring")
    return counting.phases


def _visit(
    job: Job,
    number: int,
    lengths: Sequence[int],
    texts: Sequence[Text],
    memory: DeviceMemory,
    ranks: Ranks,
    capability: tuple[int, int] | None,
) -> CountedVisit:
    """As `count_visit`, from memory where a visit of the same shape was counted before."""
    prefix = job.facts.layer(number, "")
    layer = tuple((a.source.removeprefix(prefix), a.kind, a.spec) for a in job.plan.of_layer(number))
    settings = job.plan.settings(number).model_dump_json()
    key = (
        job.facts.model_dump_json(), tuple(sorted(dict(job.sizes).items())), layer, settings, tuple(lengths),
        tuple(len(text.tokens) for text in texts), memory, ranks, capability,
    )  # fmt: skip
    if key not in _counted:
        _counted[key] = count_visit(job, number, lengths, texts, memory, ranks, capability)
    return _counted[key]
