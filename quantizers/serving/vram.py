"""Memory estimates on requested GPUs (`plan --vram`) and on common ones (report.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quantizers.architectures.architecture import Architecture, Options, ServerName
from quantizers.checkpoint.reader import Checkpoint
from quantizers.eval.report.schema import Fit as ServedFit
from quantizers.eval.report.schema import Serving
from quantizers.planning.gpus import Gpus, lacking_facts, parse_gpus
from quantizers.planning.job import Job
from quantizers.planning.plan import Plan
from quantizers.system.errors import InputError

from .findings import ServingCheck
from .host_experts import host_ways
from .kernels import KEEPS_SCALES, TAKES_THEM
from .memory import (
    FLASHINFER,
    Fit,
    KvType,
    assumptions,
    common_fits,
    fit,
    kv_bytes_per_token,
    needs_flashinfer,
    notes,
    remedies,
    serving_model,
    ways,
    weights_alone,
    with_budget,
)
from .server_commands import flags, vllm_command, vllm_options

SERVERS: tuple[ServerName, ...] = ("vllm", "sglang")
HOPPER = 90  # its compute capability, in tenths


def fits_on_common(plan: Plan, facts: Architecture, source: Checkpoint) -> dict[str, Any]:
    """Common GPUs on which a plan's output fits: `longest`, `fits` and `assumptions` of `Serving` in report.json."""
    model = serving_model(plan, facts)
    common = common_fits(model)
    gpus = [parse_gpus(row.cards) for row in common]
    return {
        "longest": model.longest,
        "fits": [ServedFit(**asdict(row)) for row in common],
        "assumptions": [*assumptions(gpus), *notes(model, common)] if common else [],
    }


def fits_on(
    job: Job,
    vram: Sequence[str],
    checked: ServingCheck,
    budget: int | None,
    *,
    context: int | None,
    kv: KvType,
    tp: int | None,
    ram: int | None,
) -> dict[str, Any]:
    """Whether the output fits on each of the GPUs, and ways to make it fit; with `ram` those in host memory.

    Args:
        vram, context, kv, tp, ram: as in `quantizers.plan`.
        checked: of the plan, which says whether KTransformers would take the experts.
        budget: bytes, all of which count before a run has chosen within it.

    Raises:
        InputError: an option needs facts that are not known of the model type.
    """
    refusal = None if checked.ktransformers == TAKES_THEM else checked.ktransformers or "SGLang lacks the model"
    gpus = [parse_gpus(text) for text in vram]
    if ram is not None and (shared := [cards.name for cards in gpus if cards.shared]):
        counted = "CPU and GPU share its memory, which is counted as the GPU's"
        raise InputError(f"--ram with --vram {shared[0]}", counted, "leave --ram out")
    if problem := lacking_facts(job.facts):
        if (context, kv, tp) != (None, "auto", None):
            raise InputError("--context, --kv and --tp", problem, "leave them out")
        if ram is not None:
            raise InputError("--ram", problem, "leave it out")
        return {"cards_unknown": problem, "weights": weights_alone(job.plan, gpus)}
    model = serving_model(job.plan, job.facts)
    about: dict[str, Any] = {}
    if budget is not None:
        about["counted"] = budget
        model = with_budget(model, budget)
    fits = [fit(model, cards, context, kv, tp) for cards in gpus]
    servers, name = job.facts.servers, job.recipe.source.model
    wanted: dict[str, Options] = {}
    for server in SERVERS:
        wanted[server] = job.facts.server_options(server, name) if server in servers else {}
    if ram is not None:
        options = {"vllm": " ".join(vllm_options(wanted["vllm"])), "sglang": " ".join(flags(wanted["sglang"]))}
        about["host"] = []
        for cards, row in zip(gpus, fits, strict=True):
            in_ram = host_ways(model, cards, row, ram, refusal, options)
            about["host"].append({"cards": cards.name, "ways": list(map(asdict, in_ram))})

    def command(cards: Gpus, row: Fit) -> str | None:
        attention = FLASHINFER if needs_flashinfer(cards, row.kv) else ""
        serving = Serving(
            servers=sorted(servers),
            parsers=wanted["vllm"],
            sglang=None,
            sampling={},
            longest=model.longest,
            fits=[ServedFit(**asdict(row))],
            assumptions=[],
        )
        words = vllm_command(serving, "OUT", attention) if row.fits else None
        as_stored = words and cards.sm == HOPPER and model.blocks and job.plan.attention == "keep"
        return f"{KEEPS_SCALES['hopper']} {words}" if as_stored else words

    return about | {
        "fits": [
            asdict(row)
            | {"nominal": cards.nominal, "command": command(cards, row)}
            | {"to_fit": [asdict(remedy) for remedy in remedies(job, model, cards, row, tp)]}
            | {"ways": [asdict(way) for way in ways(model, cards, row.context, tp)]}
            for cards, row in zip(gpus, fits, strict=True)
        ],
        "longest": model.longest,
        "kv_bytes_per_token": kv_bytes_per_token(model, kv),
        "kv_divided": job.facts.kv_cache is not None and job.facts.kv_cache.divided,
        "notes": notes(model, fits),
        "assumptions": assumptions(gpus),
    }
