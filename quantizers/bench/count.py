"""One layer of a published model's real size, counted on the meta device, and how long it would take on cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.fidelity.metrics import Text
from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import CONFIG, declared_block
from quantizers.cost.cards import CARDS, Card, card_of, rates
from quantizers.cost.cpu import Cpu, cpu_rates, this_cpu
from quantizers.cost.estimate import OF_A_CARD
from quantizers.cost.lengths import longest_possible
from quantizers.cost.routing import TAKEN
from quantizers.cost.seconds import DISK, HASH, layer_seconds
from quantizers.cost.visit import CountedVisit, count_visit, texts_of
from quantizers.cost.work import together
from quantizers.device.rough import FASTER
from quantizers.plan.job import Job
from quantizers.plan.making import expected_tensors, make_plan
from quantizers.plan.solve_memory import DeviceMemory, device_memory
from quantizers.recipe.schema import Recipe
from quantizers.system.package_data import shipped

from .random_model import published, resized

HELD_OUT = "held-out"  # the shipped set that passes through both lanes


def published_job(like: str, experts: int | None = None, **sizes: int) -> Job:
    """The job of quantizing a published model with the default settings, as deep as its first layer with experts.

    Args:
        like: see `random_model.published`.
        experts: fewer than the model has.
        sizes: other sizes, by this program's names for them.
    """
    config = published(like)
    first = sizes_of(architecture_for(config, CONFIG), config, CONFIG).moe_layers[0]
    config = resized(config, layers=first + 1, **(sizes | ({"experts": experts} if experts else {})))
    facts = architecture_for(config, CONFIG)
    size = sizes_of(facts, config, CONFIG)
    recipe = Recipe.model_validate({"source": {"model": like}, "calibration": HELD_OUT})
    block = declared_block(config, CONFIG)
    plan = make_plan(facts, size, expected_tensors(facts, size, config, CONFIG), recipe.experts, like, block)
    return Job(recipe, Path(like), facts, size, config, plan, None, like, plan.fp8_form(block))


def count_layer(
    like: str,
    tokens: int,
    *,
    length: int = 8192,
    experts: int | None = None,
    card: str | None = None,
    limit: int | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Count the visit to a layer with experts.

    Args:
        like: a model with published facts in this program.
        tokens: calibration tokens, in sequences of `length`.
        experts: fewer than the model has.
        card: the one whose memory and seconds are asked for, see `cards.card_of`, or `cpu` for this machine's cores;
            None for the seconds of all cards.
        limit: bytes of device memory; None for what the card has, or without one for no limit.
        sizes: other sizes, by this program's names for them.

    Returns:
        For each phase what was counted on the first card, see `Work.as_dict`, and seconds by card; the same of the
        layer, and of all layers with experts; the peak of living bytes, beside the bytes that a run sets aside; and the
        rates.

    Raises:
        InputError: no facts are kept for this model, the card is not known, or the memory is too small.
        QuantizeError: an operation whose sum has no order on a GPU.
    """
    job = published_job(like, experts, **sizes)
    devices = _devices(card, job)
    if limit is None and len(devices) == 1 and isinstance(devices[0], Card):
        limit = int(OF_A_CARD * devices[0].memory)
    lengths, texts = sequences(tokens, length)
    held_out = sum(len(text.tokens) for text in texts)
    memory = device_memory(job.plan, job.sizes, max(lengths), True, limit, tokens, held_out=held_out)
    visits: dict[bool, CountedVisit] = {}  # the work is the same on all devices, but that some rank points roughly
    for device in devices:
        if _ranks(device) not in visits:
            capability = device.capability if isinstance(device, Card) else None
            number = job.sizes.moe_layers[0]
            visits[_ranks(device)] = count_visit(job, number, lengths, texts, memory, capability=capability)
    visit = visits[_ranks(devices[0])]
    whole = sizes_of(job.facts, published(like), CONFIG)
    return described(job, lengths, texts) | {
        "memory": memory.as_dict() | {"limit": limit},
        "layers": len(whole.moe_layers),
        "source_bytes": visit.source,
        "written_bytes": visit.shard,
        "peak_bytes": visit.peak,
        "phases": {name: work.as_dict() for name, work in visit.phases.items()},
        "layer": together(visit.phases.values()).as_dict(),
        "cards": _on_devices(visits, memory, devices, len(whole.moe_layers)),
        "assumptions": [
            TAKEN,
            *_rates(devices),
            f"{DISK / 1e9:g} GB/s read from or written to files, {HASH / 1e9:g} GB/s hashed by a thread",
        ],
    }


def sequences(tokens: int, length: int) -> tuple[list[int], list[Text]]:
    """Tokens of each calibration sequence of `length`, the last one cut; and the shipped held-out texts."""
    lengths = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    return lengths, texts_of(longest_possible(shipped("calibration") / f"{HELD_OUT}.yaml") or [])


def described(job: Job, lengths: Sequence[int], texts: Sequence[Text]) -> dict[str, Any]:
    """What is counted: the model, its sizes, and what passes through it."""
    return {
        "like": job.recipe.source.model,
        "sizes": {word: job.sizes[word] for word in ("experts", "chosen", "hidden", "width")},
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "held_out": {"texts": len(texts), "tokens": sum(len(text.tokens) for text in texts)},
    }


def _devices(name: str | None, job: Job) -> list[Card | Cpu]:
    if name is None:
        return list(CARDS.values())
    return [this_cpu(job.sizes) if name.lower() == "cpu" else card_of(name)]


def _ranks(device: Card | Cpu) -> bool:
    """Whether a search ranks its points roughly there, see solve/ranking.py."""
    return isinstance(device, Card) and device.capability in FASTER


def _rates(devices: Sequence[Card | Cpu]) -> list[str]:
    if cpu := [device for device in devices if isinstance(device, Cpu)]:
        return [cpu_rates(cpu[0].cores)]
    return rates([device for device in devices if isinstance(device, Card)])


def _on_devices(
    visits: Mapping[bool, CountedVisit], memory: DeviceMemory, devices: Sequence[Card | Cpu], layers: int
) -> dict[str, dict[str, Any]]:
    """Seconds on each device, and whether its memory is enough for what is held."""
    found = {}
    for device in devices:
        seconds = layer_seconds(visits[_ranks(device)], device)
        found[device.name] = {
            "phases": dict(seconds.phases),
            "reading": seconds.reading,
            "writing": seconds.writing,
            "layer": seconds.layer,
            "all_layers": seconds.layer * layers,
            "fits": not isinstance(device, Card) or memory.peak <= OF_A_CARD * device.memory,
        }
    return found
