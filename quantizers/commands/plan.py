"""What a run would do and need, and where its output fits: `quantizers.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from quantizers.budget.choice import apply_choice
from quantizers.checkpoint.reader import left_behind
from quantizers.hooks import required
from quantizers.pipeline.consumers import plan_findings
from quantizers.planning.estimate import DISK, estimate_run, memory_on_gpu, ways_of_source
from quantizers.planning.gpus import unsaid
from quantizers.planning.job import prepare
from quantizers.planning.plan import listing, summary
from quantizers.recipe.read import changes_of
from quantizers.system.errors import InputError

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


def plan(
    recipe: str | Path,
    *,
    source: str | Path | None = None,
    calibration: str | Path | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    facts: str | Path | None = None,
    output: str | Path | None = None,
    hub: bool = False,
    device_memory: int | None = None,
    nodes: int = 1,
    gpus: int = 1,
    disk: int | None = None,
    tensors: bool = False,
    vram: Sequence[str] = (),
    context: int | None = None,
    kv: Literal["auto", "fp8"] = "auto",
    tp: int | None = None,
    ram: int | None = None,
) -> PlannedRun:
    """Show what a run would do and need; with `vram`, where its output fits. Reads headers only.

    Args:
        recipe, source, calibration, settings: as in `quantizers.run`.
        facts: the user's own architecture spec, instead of the one that the recipe may name.
        output: with a budget: the folder of a run, to show the schemes that it chose.
        hub: read the headers from the Hub even if the architecture spec is built in.
        device_memory: bytes of the device's memory that the run may use at most.
        nodes, gpus: machines, and GPUs of each, for which a run is estimated as well.
        disk: bandwidth of a machine's disk in bytes per second; 1 GB by default.
        tensors: list every tensor with its action.
        vram: GPUs to serve the output on, such as 2x96GiB or 2xH100.
        context: with `vram`, context length in tokens; the model's maximum by default.
        kv: with `vram`, 16-bit keys and values (auto), or fp8.
        tp: with `vram`, tensor-parallel size; the largest that vLLM allows by default.
        ram: with `vram`, bytes of host memory: then also the ways with experts there.

    Raises:
        InputError: the recipe or its source is wrong, or arguments do not go together.
    """
    if not vram and (context is not None or tp is not None or kv != "auto" or ram is not None):
        raise InputError("--context, --kv, --tp and --ram go with --vram; say which GPUs, as --vram 2x96GiB")
    if vram and (nodes, gpus, disk) != (1, 1, None):
        raise InputError("--nodes, --gpus and --disk plan a run, --vram plans serving; give one or the other")
    fits_on = required("fits_on", "--vram") if vram else None
    job = prepare(
        str(recipe),
        offline_facts=True,
        hub=hub,
        source_folder=Path(source) if source is not None else None,
        facts_file=Path(facts) if facts is not None else None,
        changes=changes_of(settings, calibration),
    )
    checked = plan_findings(job, one_expert=True)
    job, schemes = apply_choice(job, Path(output) if output is not None else None)
    budget = job.allocation.most_bytes if job.allocation and "layers" not in (schemes or ()) else None
    figures: dict[str, Any] = {"basis": job.basis, "recipe": str(job.path), "servers": sorted(job.facts.servers)}
    figures["limits"] = [f"{one.engine}: {one.consequence}" for one in checked.findings]
    if job.recipe.experts.signed and job.recipe.experts.engine == "gram":
        figures["limits"].append(NEGATIVE_SCALES)
    if job.source and (left := left_behind(job.source)):
        figures |= {"left_behind": left}
    if found := job.facts.found():
        figures |= {"architecture": found, "origin": job.facts.origin()}
    if fits_on is not None:
        return PlannedRun(figures | fits_on(job, [*vram], checked, budget, context=context, kv=kv, tp=tp, ram=ram))
    # Actions and bytes of a run, and an estimate of its memory and time.
    figures |= summary(job.plan, job.facts) | {"cards_unknown": unsaid(job.facts)}
    needs = estimate_run(job, budget or int(figures["output_bytes"]), nodes * gpus, disk or DISK)
    figures |= {"needs": asdict(needs), "asked": {"machines": nodes, "gpus": gpus}}
    figures |= {"source_ways": [asdict(way) for way in ways_of_source(job, needs.output, nodes * gpus)]}
    if device_memory:
        figures |= {"device_memory": asdict(memory_on_gpu(job, device_memory))}
    if schemes:
        figures |= {"schemes": schemes}
    if tensors:
        figures |= {"tensors": listing(job.plan)}
    return PlannedRun(figures)
