"""`quantize plan`: what a run would do and need, and whether its output fits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes

from .options import (
    CalibrationOption,
    DebugOption,
    DeviceMemoryOption,
    DiskOption,
    FactsOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    SourceOption,
    emit,
)

if TYPE_CHECKING:
    from quantizers.planning.job import Job


def plan(
    *,
    recipe: RecipeArgument,
    vram: Annotated[
        list[str] | None,
        typer.Option(metavar="NxGPU", help="GPUs to serve the output on, such as 2x96GiB or 2xH100; may be repeated"),
    ] = None,
    source: SourceOption = None,
    calibration: CalibrationOption = None,
    settings: SetOption = None,
    facts: FactsOption = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="with --vram: context length; the model's maximum by default"),
    ] = None,
    kv: Annotated[
        Literal["auto", "fp8"], typer.Option(help="with --vram: 16-bit keys and values (auto), or fp8")
    ] = "auto",
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="with --vram: tensor-parallel size; the largest that vLLM allows by default"),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor with its action")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="with a budget: the folder of a run, to show the schemes that it chose"),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="read the headers from the Hub even if the architecture spec is built in")
    ] = False,
    device_memory: DeviceMemoryOption = None,
    nodes: Annotated[int, typer.Option(min=1, help="also estimate a run on this number of machines")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="also estimate a run on this number of GPUs per machine")] = 1,
    disk: DiskOption = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="time one layer with random weights on this machine instead")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(min=16, help="with --measure: calibration tokens; one token chunk by default")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=2, help="with --measure: experts of the layer; as many as fit into memory by default"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="with --measure: cpu, cuda, cuda:N, or auto (the first GPU if there is one)")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what a run would do and need, and where its output fits.

    Lists the action for every kind of tensor, disk, memory and time; with --vram, whether the output fits on GPUs.
    Reads headers only: of a folder, of the Hub's cache, or of the Hub itself; models with a
    built-in architecture spec need no network.

    Times are estimated from nominal rates; --nodes and --gpus divide them among processes. --measure quantizes
    one layer of the model's size, with random weights, on this machine: seconds by phase, hours for all layers.

    Example: quantize plan minimax-m2.1-fp8-int4 --vram 2x96GiB --vram 4x24GiB --context 196608
    """
    from quantizers.budget.choice import apply_choice
    from quantizers.planning.job import prepare
    from quantizers.recipe.changes import changes_of

    if vram is None and (context is not None or tp is not None or kv != "auto"):
        raise InputError("--context, --kv and --tp go with --vram; say which GPUs, as --vram 2x96GiB")
    if vram is not None and (nodes, gpus, disk) != (1, 1, None):
        raise InputError("--nodes, --gpus and --disk plan a run, --vram plans serving; give one or the other")
    for_measure = {"--tokens": tokens, "--experts": experts, "--device": device}
    if not measure and (named := [option for option, value in for_measure.items() if value is not None]):
        raise InputError(f"{', '.join(named)}: only with --measure; add it")
    if measure and (vram is not None or tensors or (nodes, gpus, disk) != (1, 1, None)):
        raise InputError("--measure times a layer in one process; leave out --vram, --tensors, --nodes, --gpus, --disk")
    changes = changes_of(settings or (), calibration)
    job = prepare(recipe, offline_facts=True, hub=hub, source_folder=source, own=facts, changes=changes)
    job, schemes = apply_choice(job, output)
    where = {"basis": job.basis, "recipe": str(job.path), "servers": sorted(job.facts.servers)}
    if measure:
        limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
        _measure(job, device or "auto", tokens, experts, limit, where, as_json)
        return
    if vram is not None:
        from quantizers.cli.tables.plan import fit_table
        from quantizers.planning.gpus import parse_gpus
        from quantizers.planning.serving_memory import (
            assumptions,
            fit,
            kv_bytes_per_token,
            notes,
            remedies,
            serving_model,
        )

        model = serving_model(job.plan, job.facts, job.sizes, job.config, job.fp8)
        cards = [parse_gpus(text) for text in vram]
        asked = [(one, fit(model, one, context, kv, tp)) for one in cards]
        rows = [
            found.as_dict() | {"to_fit": [remedy.as_dict() for remedy in ways]}
            for (_, found), ways in zip(asked, remedies(job, model, asked, tp), strict=True)
        ]
        result = where | {
            "fits": rows,
            "longest": model.longest,
            "kv_bytes_per_token": kv_bytes_per_token(model, kv),
            "kv_divided": job.facts.kv_cache is not None and job.facts.kv_cache.split_by is not None,
            "notes": notes(model, (found for _, found in asked)),
            "assumptions": assumptions(cards),
        }
        emit(result, as_json, fit_table(result))
        return
    from quantizers.cli.tables.plan import plan_table, tensors_table
    from quantizers.planning.estimate import DISK, estimate_run, memory_on_gpu
    from quantizers.planning.plan import listing, summary
    from quantizers.planning.serving_memory import unsaid

    numbers = summary(job.plan, job.sizes) | ({"schemes": schemes} if schemes else {})
    numbers |= {"cards_unknown": unsaid(job.facts)}
    rate = parse_bytes(disk, "--disk") if disk else DISK
    needs = estimate_run(job, int(str(numbers["output_bytes"])), nodes * gpus, rate)
    numbers |= where | {"needs": needs.as_dict(), "asked": {"machines": nodes, "gpus": gpus}}
    if device_memory:
        numbers |= {"device_memory": memory_on_gpu(job, parse_bytes(device_memory, "--device-memory")).as_dict()}
    if tensors:
        numbers |= {"tensors": listing(job.plan)}
    emit(numbers, as_json, tensors_table(numbers) if tensors else plan_table(numbers))


def _measure(
    job: Job,
    device: str,
    tokens: int | None,
    experts: int | None,
    limit: int | None,
    where: dict[str, Any],
    as_json: bool,
) -> None:
    """Time one layer, and print what follows for the whole run."""
    from quantizers.cli.tables.plan import measured_table
    from quantizers.device.devices import choose_device, use_threads
    from quantizers.pipeline.layer_measurement import measure_layer

    use_threads(job.sizes)
    found = measure_layer(job, choose_device(device), tokens=tokens, experts=experts, limit=limit)
    emit(where | {"measured": found}, as_json, measured_table(found))
