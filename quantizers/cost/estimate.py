"""Disk, memory and time of a run before it starts, from the plan, the sizes of its data, and counted work.

Bytes follow from shapes. Time is that of one visit to a layer of each kind and of the scoring, counted (whole_run.py),
by rates that are assumed; `assumptions` lists them. On a GPU it is that of one H100, or of an H200 if a layer does not
fit on that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quantizers.calibration.set import read_set
from quantizers.plan.job import Job
from quantizers.plan.solve_memory import DeviceMemory, device_memory
from quantizers.plan.states import calibration_bytes
from quantizers.recipe.read import set_location
from quantizers.system.errors import InputError
from quantizers.system.thread_map import THREADS

from .cards import CARDS, Card, rates
from .counted_team import ALONE, Ranks
from .cpu import cpu_rates, this_cpu
from .lengths import cut_to, longest_possible
from .routing import TAKEN
from .seconds import DISK, HASH
from .several import several_needs
from .visit import texts_of
from .whole_run import count_run

ITEMSIZES = {"CPU": 4, "GPU": 2}  # bytes of one element of a hidden state
HOST = 1 << 30  # bytes of host memory for the program and its libraries
OF_A_CARD = 0.9  # of its memory is used, as `device_limit` does


@dataclass(frozen=True)
class Estimate:
    """All sizes in bytes, times in seconds.

    Attributes:
        tokens, held_out: upper bounds for the calibration set and the held-out set; None if the size is unknown until
            the set is read. 0 held-out tokens mean that there is no evaluation.
        source: bytes of the source.
        output: disk space needed in addition to the source.
        states: hidden states of the calibration set during the run, by kind of device: host memory, or disk space where
            they do not fit.
        host: host memory for two layers of the source and two of the output, what lies outside the layers, and the
            program itself.
        memory: device memory, by kind of device: with the sums of one unit of experts at a time, and with all that is
            worth holding.
        card: the GPU of the counted figures; None if no known one has the memory.
        counted_peak: the most bytes that are alive on it.
        operations: multiplications and additions of the layers and the proof.
        seconds: by kind of device: `layers`, `proof`, and `all` for their sum.
        drawn: whether `tokens` are those of the recipe's calibration.tokens.
        disk: bytes a second that a machine reads from or writes to files.
        several: what `several_needs` says, where several processes are asked for; None if a size or a card is unknown.
    """

    tokens: int | None
    held_out: int | None
    source: int
    output: int
    states: dict[str, int] | None
    host: int
    memory: dict[str, tuple[int, int]]
    card: str | None = None
    counted_peak: int | None = None
    operations: float | None = None
    seconds: dict[str, dict[str, float]] | None = None
    drawn: bool = False
    several: dict[str, Any] | None = None
    disk: float = DISK

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the assumptions."""
        return asdict(self) | {"assumptions": assumptions(self)}


def estimate_run(job: Job, output_bytes: int, ranks: Ranks = ALONE, disk: float = DISK) -> Estimate:
    """Estimate a run of this job. This reads the YAML files of its sets, but none of their data.

    Args:
        output_bytes: size of the finished checkpoint.
        ranks: processes with a GPU each whose run is asked for beside that of one.
        disk: bytes a second that each machine reads from or writes to files.
    """
    lengths, drawn = _calibration(job)
    held_out = _held_out(job)
    plan, numbers = job.plan, range(job.plan.layers)
    layer_source = max(sum(action.spec.bytes for action in plan.of_layer(n)) for n in numbers)
    layer_output = max(sum(spec.bytes for spec in plan.shard(n).values()) for n in numbers)
    outside = sum(action.spec.bytes for action in plan.of_layer(None))
    tokens = None if lengths is None else sum(lengths)
    memory = {}
    for name in ITEMSIZES:
        there = name == "GPU"
        whole = device_memory(plan, job.sizes, _longest(job), there, None, tokens, held_out=sum(held_out or ()))
        memory[name] = (whole.smallest, whole.peak)
    return Estimate(
        tokens,
        None if held_out is None else sum(held_out),
        sum(action.spec.bytes for action in plan.actions),
        output_bytes,
        None if tokens is None else {n: calibration_bytes(job.sizes, tokens, size) for n, size in ITEMSIZES.items()},
        2 * (layer_source + layer_output) + outside + HOST,
        memory,
        drawn=drawn,
        disk=disk,
        **({} if lengths is None or held_out is None else _counted(job, lengths, held_out, output_bytes, ranks, disk)),
    )


def _counted(
    job: Job, lengths: Sequence[int], held_out: Sequence[int], output: int, ranks: Ranks, disk: float
) -> dict[str, Any]:
    """What follows from counted work."""
    card, memory = _card_for(job, sum(lengths), sum(held_out))
    work = count_run(
        job, lengths, texts_of(held_out), memory, output, capability=None if card is None else card.capability
    )
    seconds = {"CPU": work.seconds(this_cpu(job.sizes), disk)}
    if card is None:
        return {"operations": float(work.flops()), "seconds": seconds}
    several = None
    if ranks.count > 1:
        held = _on_card(job, card, sum(lengths), sum(held_out), ranks.count)
        several = several_needs(job, lengths, held_out, output, card, held, work, ranks, disk)
    return {
        "card": card.name,
        "counted_peak": work.peak,
        "operations": float(work.flops()),
        "seconds": seconds | {"GPU": work.seconds(card, disk)},
        "several": several,
    }


def _card_for(job: Job, tokens: int, held_out: int) -> tuple[Card | None, DeviceMemory]:
    """The first card whose memory is enough, and what is held there; without one, what is held with no limit."""
    for name in ("h100", "h200"):
        card = CARDS[name]
        try:
            return card, _on_card(job, card, tokens, held_out)
        except InputError:
            continue
    return None, device_memory(job.plan, job.sizes, _longest(job), True, None, tokens, held_out=held_out)


def _on_card(job: Job, card: Card, tokens: int, held_out: int, processes: int = 1) -> DeviceMemory:
    """What is held on a card by one of so many processes."""
    limit = int(OF_A_CARD * card.memory)
    return device_memory(job.plan, job.sizes, _longest(job), True, limit, tokens, processes, held_out=held_out)


def _longest(job: Job) -> int:
    return read_set(set_location(job.recipe.calibration_set, job.path)).lengths[-1]


def _calibration(job: Job) -> tuple[list[int] | None, bool]:
    """Tokens of each calibration sequence at most, None if unknown; and whether they are a part of the set."""
    most = longest_possible(set_location(job.recipe.calibration_set, job.path))
    asked = job.recipe.calibration_tokens
    if asked is None or (most is not None and asked >= sum(most)):
        return most, False
    longest = _longest(job)
    return cut_to([longest] * -(-asked // longest) if most is None else most, asked), True


def _held_out(job: Job) -> list[int] | None:
    """Tokens of each held-out text at most; none where nothing is evaluated, and None if unknown."""
    perplexity = job.recipe.verify and job.recipe.verify.perplexity
    return longest_possible(set_location(perplexity.data, job.path)) if perplexity else []


def memory_on_gpu(job: Job, limit: int) -> DeviceMemory:
    """What a run on a GPU holds there within `limit` bytes.

    Raises:
        InputError: the limit is too small even for one unit of experts at a time.
    """
    lengths, _ = _calibration(job)
    tokens = None if lengths is None else sum(lengths)
    return device_memory(job.plan, job.sizes, _longest(job), True, limit, tokens, held_out=sum(_held_out(job) or ()))


def assumptions(needs: Estimate) -> list[str]:
    """The assumptions behind the figures, one line each."""
    card = next((card for card in CARDS.values() if card.name == needs.card), CARDS["h100"])
    return [
        "tokens: the recipe's calibration.tokens; every held-out text as long as its sequence_length allows"
        if needs.drawn
        else "tokens: every sample as long as its sequence_length allows, which few are",
        "time: counted for one layer of each kind, with held-out texts through source and output and the audit of its "
        "shard, and for the proof: logits and one last reading of the shards; measuring for a budget comes on top",
        TAKEN,
        *(f"on a GPU, {line}" for line in rates([card])),
        f"on a CPU: {cpu_rates(len(os.sched_getaffinity(0)))}",
        f"files: {needs.disk / 1e9:g} GB/s read or written, {HASH / 1e9:g} GB/s hashed by a thread, the "
        f"last reading by up to {THREADS}",
        "memory: with the sums of one unit of experts at a time, and with those of all, and on a GPU with the hidden "
        "states as well; that is set aside, and counted is what is alive at most",
    ]
