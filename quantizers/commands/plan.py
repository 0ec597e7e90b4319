"""Plan of a run (`quantizers.plan`): its actions, its requirements, and the GPUs that its output fits on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from quantizers.budget.choice import apply_choice
from quantizers.checkpoint.reader import left_behind
from quantizers.eval.report.schema import Schemes
from quantizers.hooks import required
from quantizers.pipeline.consumers import plan_findings
from quantizers.planning.estimate import DISK, estimate_run, memory_on_gpu, ways_of_source
from quantizers.planning.gpus import lacking_facts
from quantizers.planning.job import prepare
from quantizers.planning.plan import listing, summary
from quantizers.recipe.read import changes_of
from quantizers.stitch.write.config_files import remarks_on_config
from quantizers.system.errors import InputError

from . import options as opt

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
        raise InputError("", "--context, --kv, --tp and --ram go with --vram", "say which GPUs, as --vram 2x96GiB")
    if vram and (nodes, gpus, disk, device_memory, tensors) != (1, 1, None, None, False):
        raise InputError(
            "",
            "--nodes, --gpus, --disk, --device-memory and --tensors plan a run, --vram plans serving",
            "give one or the other",
        )
    fits_on = required("fits_on", "--vram") if vram else None
    job = prepare(
        str(recipe),
        offline_facts=True,
        hub=hub,
        source_folder=Path(source) if source is not None else None,
        facts_file=Path(facts) if facts is not None else None,
        changes=changes_of(settings, calibration),
    )
    if hub and Path(job.location).is_dir():
        raise InputError("--hub", f"{job.location} is a folder, whose headers are read", "leave it out")
    checked = plan_findings(job, one_expert=True)
    job, schemes = apply_choice(job, Path(output) if output is not None else None)
    budget = job.allocation.most_bytes if job.allocation and not isinstance(schemes, Schemes) else None
    figures: dict[str, Any] = {"basis": job.basis, "recipe": str(job.path), "servers": sorted(job.facts.servers)}
    figures["limits"] = [f"{finding.engine}: {finding.consequence}" for finding in checked.findings]
    if job.recipe.experts.convert is None and job.recipe.experts.signed and job.recipe.experts.engine == "gram":
        figures["limits"].append(NEGATIVE_SCALES)
    if job.source:
        measured = job.recipe.experts.convert is None
        figures["limits"] += remarks_on_config(job.source, job.facts, measured=measured)
        if left := left_behind(job.source):
            figures |= {"left_behind": left}
    if architecture := job.facts.found():
        figures |= {"architecture": architecture, "origin": job.facts.origin()}
    if fits_on is not None:
        return PlannedRun(figures | fits_on(job, [*vram], checked, budget, context=context, kv=kv, tp=tp, ram=ram))
    # Actions and bytes of a run, and an estimate of its memory and time.
    figures |= summary(job.plan, job.facts) | {"cards_unknown": lacking_facts(job.facts)}
    needs = estimate_run(job, budget or int(figures["output_bytes"]), nodes * gpus, disk or DISK)
    figures |= {"needs": asdict(needs), "asked": {"machines": nodes, "gpus": gpus}}
    figures |= {"source_ways": [asdict(way) for way in ways_of_source(job, needs.output, nodes * gpus)]}
    if device_memory and job.recipe.experts.convert is None:
        figures |= {"device_memory": asdict(memory_on_gpu(job, device_memory))}
    if schemes:
        figures |= {"schemes": schemes.as_dict()}
    if job.recipe.experts.convert is not None:
        figures |= {"converted_to": job.recipe.experts.convert}
    if tensors:
        figures |= {"tensors": listing(job.plan)}
    return PlannedRun(figures)
