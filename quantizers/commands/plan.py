"""What a run would do and need, and where its output fits: `quantizers.plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from quantizers.budget.choice import apply_choice
from quantizers.checkpoint.reader import left_behind
from quantizers.eval.report.schema import Fit as ServedFit
from quantizers.eval.report.schema import Schemes, Serving
from quantizers.eval.report.summary import flags, vllm_command, vllm_options
from quantizers.eval.serving.cards import KEEPS_SCALES, TAKES_THEM
from quantizers.pipeline.servable import planned_check
from quantizers.planning.estimate import DISK, estimate_run, memory_on_gpu, ways_of_source
from quantizers.planning.gpus import Gpus, parse_gpus
from quantizers.planning.host_experts import host_ways
from quantizers.planning.job import Job, prepare
from quantizers.planning.plan import listing, summary
from quantizers.planning.serving_memory import (
    FLASHINFER,
    Fit,
    assumptions,
    fit,
    kv_bytes_per_token,
    needs_flashinfer,
    notes,
    remedies,
    serving_model,
    unsaid,
    ways,
    weights_alone,
    with_budget,
)
from quantizers.recipe.read import changes_of
from quantizers.system.errors import InputError

from . import options as opt

HOPPER = 90  # its compute capability, in tenths
# docs/how-to/serve-with-vllm.md has the table.
NEGATIVE_SCALES = "group scales may be negative; `experts.scales_sign: positive` is for kernels not checked with those"


@dataclass(frozen=True)
class PlannedRun:
    """The result of `plan`.

    Attributes:
        figures: what `quantize plan --json` prints: actions, bytes, memory and time; or with `vram` the fits.
    """

    figures: dict[str, Any]

    @property
    def output_bytes(self) -> int | None:
        """Size of the finished checkpoint; None with `vram`."""
        return self.figures.get("output_bytes")

    @property
    def fits(self) -> list[dict[str, Any]]:
        """With `vram`, for each of the GPUs, whether and with which context the output fits there.

        Empty where that is not known of the model type, and `weights` in the figures says what is.
        """
        return list(self.figures.get("fits", ()))


@opt.documented
def plan(
    recipe: opt.Recipe,
    *,
    vram: Annotated[
        Sequence[str],
        opt.Option("GPUs to serve the output on, such as 2x96GiB or 2xH100; may be repeated", "NxGPU"),
    ] = (),
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    settings: opt.Settings = (),
    facts: Annotated[opt.Facts, "the user's own architecture spec, instead of the one that the recipe may name"] = None,
    context: Annotated[
        int | None, opt.Option("with --vram: context length; the model's maximum by default", "TOKENS", min=1)
    ] = None,
    kv: Annotated[Literal["auto", "fp8"], opt.Option("with --vram: 16-bit keys and values (auto), or fp8")] = "auto",
    tp: Annotated[
        int | None,
        opt.Option("with --vram: tensor-parallel size; the largest that vLLM allows by default", min=1),
    ] = None,
    ram: Annotated[
        int | None,
        opt.Option("with --vram: host memory, such as 128GB; the ways with experts there", "SIZE"),
        "with `vram`, bytes of host memory: then also the ways with experts there",
    ] = None,
    tensors: Annotated[bool, opt.Option("list every tensor with its action")] = False,
    output: Annotated[
        str | Path | None,
        opt.Option(
            "with a budget: the folder of a run, to show the schemes that it chose", names=opt.OUTPUT, is_path=True
        ),
    ] = None,
    hub: Annotated[bool, opt.Option("read the headers from the Hub even if the architecture spec is built in")] = False,
    device_memory: opt.DeviceMemory = None,
    nodes: Annotated[int, opt.Option("also estimate a run on this number of machines", min=1)] = 1,
    gpus: Annotated[int, opt.Option("also estimate a run on this number of GPUs per machine", min=1)] = 1,
    disk: Annotated[
        int | None, opt.Option("disk bandwidth of a machine, in bytes per second; 1GB by default", "SIZE")
    ] = None,
) -> PlannedRun:
    """Show what a run would do and need; with `vram`, where its output fits. Reads headers only.

    Raises:
        InputError: the recipe or its source is wrong, or arguments do not go together.
    """
    if not vram and (context is not None or tp is not None or kv != "auto" or ram is not None):
        raise InputError("--context, --kv, --tp and --ram go with --vram; say which GPUs, as --vram 2x96GiB")
    if vram and (nodes, gpus, disk) != (1, 1, None):
        raise InputError("--nodes, --gpus and --disk plan a run, --vram plans serving; give one or the other")
    job = prepare(
        str(recipe),
        offline_facts=True,
        hub=hub,
        source_folder=Path(source) if source is not None else None,
        facts_file=Path(facts) if facts is not None else None,
        changes=changes_of(settings, calibration),
    )
    checked = planned_check(job, one_expert=True)
    job, schemes = apply_choice(job, Path(output) if output is not None else None)
    budget = job.allocation.most_bytes if job.allocation and not isinstance(schemes, Schemes) else None
    figures: dict[str, Any] = {"basis": job.basis, "recipe": str(job.path), "servers": sorted(job.facts.servers)}
    figures["limits"] = [f"{one.engine}: {one.consequence}" for one in checked.findings]
    if job.recipe.experts.signed and job.recipe.experts.engine == "gram":
        figures["limits"].append(NEGATIVE_SCALES)
    if job.source and (left := left_behind(job.source)):
        figures |= {"left_behind": left}
    if found := job.facts.found():
        figures |= {"architecture": found, "origin": job.facts.origin()}
    if vram:
        refusal = None if checked.ktransformers == TAKES_THEM else checked.ktransformers or "SGLang lacks the model"
        serving = _serving(job, vram, context=context, kv=kv, tp=tp, ram=ram, ktransformers=refusal, budget=budget)
        return PlannedRun(figures | serving)
    # Actions and bytes of a run, and an estimate of its memory and time.
    figures |= summary(job.plan, job.facts) | {"cards_unknown": unsaid(job.facts)}
    needs = estimate_run(job, budget or int(figures["output_bytes"]), nodes * gpus, disk or DISK)
    figures |= {"needs": asdict(needs), "asked": {"machines": nodes, "gpus": gpus}}
    figures |= {"source_ways": [asdict(way) for way in ways_of_source(job, needs.output, nodes * gpus)]}
    if device_memory:
        figures |= {"device_memory": asdict(memory_on_gpu(job, device_memory))}
    if schemes:
        figures |= {"schemes": schemes.as_dict()}
    if tensors:
        figures |= {"tensors": listing(job.plan)}
    return PlannedRun(figures)


def _serving(
    job: Job,
    vram: Sequence[str],
    *,
    context: int | None,
    kv: Literal["auto", "fp8"],
    tp: int | None,
    ram: int | None,
    ktransformers: str | None,
    budget: int | None,
) -> dict[str, Any]:
    """Whether the output fits on each of the GPUs, and ways to make it fit; with `ram` those in host memory.

    Args:
        ktransformers: why it would not take the experts.
        budget: bytes, all of which count before a run has chosen within it.
    """
    gpus = [parse_gpus(text) for text in vram]
    if problem := unsaid(job.facts):
        if (context, kv, tp) != (None, "auto", None):
            raise InputError(f"--context, --kv and --tp: {problem}; leave them out")
        if ram is not None:
            raise InputError(f"--ram: {problem}; leave it out")
        return {"cards_unknown": problem, "weights": weights_alone(job.plan, gpus)}
    model = serving_model(job.plan, job.facts, job.config, job.fp8)
    about: dict[str, Any] = {}
    if budget is not None:
        about["counted"] = budget
        model = with_budget(model, budget)
    fits = [fit(model, one, context, kv, tp) for one in gpus]
    servers, name = job.facts.servers, job.recipe.source.model
    wanted = {one: job.facts.server_options(one, name) if one in servers else {} for one in ("vllm", "sglang")}
    if ram is not None:
        options = {"vllm": " ".join(vllm_options(wanted["vllm"])), "sglang": " ".join(flags(wanted["sglang"]))}
        found = [
            host_ways(model, cards, one, ram, ktransformers, options) for cards, one in zip(gpus, fits, strict=True)
        ]
        about["host"] = [
            {"cards": cards.name, "ways": list(map(asdict, way))} for cards, way in zip(gpus, found, strict=True)
        ]

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
            asdict(one)
            | {"nominal": cards.nominal, "command": command(cards, one)}
            | {"to_fit": [asdict(remedy) for remedy in remedies(job, model, cards, one, tp)]}
            | {"ways": [asdict(way) for way in ways(model, cards, one.context, tp)]}
            for cards, one in zip(gpus, fits, strict=True)
        ],
        "longest": model.longest,
        "kv_bytes_per_token": kv_bytes_per_token(model, kv),
        "kv_divided": job.facts.kv_cache is not None and job.facts.kv_cache.divided,
        "notes": notes(model, fits),
        "assumptions": assumptions(gpus),
    }
