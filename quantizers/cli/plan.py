"""`quantize plan`: what a run would do and need, and whether its output fits."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

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
    from quantizers.cli.tables.plan import fit_table, measured_table, plan_table, tensors_table, weights_table
    from quantizers.commands.plan import plan as plan_run

    with _without_collection():
        figures = plan_run(
            recipe,
            source=source,
            calibration=calibration,
            settings=settings or (),
            facts=facts,
            output=output,
            hub=hub,
            device_memory=parse_bytes(device_memory, "--device-memory") if device_memory else None,
            nodes=nodes,
            gpus=gpus,
            disk=parse_bytes(disk, "--disk") if disk else None,
            tensors=tensors,
            vram=vram or (),
            context=context,
            kv=kv,
            tp=tp,
            measure=measure,
            tokens=tokens,
            experts=experts,
            device=device,
        ).figures
    if measure:
        text = measured_table(figures["measured"])
    elif vram:
        text = (weights_table if "weights" in figures else fit_table)(figures)
    else:
        text = (tensors_table if tensors else plan_table)(figures)
    emit(figures, as_json, text)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Look for no cycles: a plan is many objects without any, and that of a large model would take a tenth longer."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
