"""`quantize stitch`: parse, call, print, exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    GATE_FAILED,
    DebugOption,
    DeviceOption,
    FactsOption,
    JsonOption,
    default_output,
    emit,
    refuse_unfinished_runs,
    typed,
)


def stitch(
    *,
    source: Annotated[str, typer.Option(help="the FP8 model: a folder or Hub id")],
    experts: Annotated[
        str, typer.Option(help="a checkpoint with packed experts, quantized from a BF16 copy of the source")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="folder for the mixed checkpoint, new or empty; out/<name of --experts>-stitched by default",
        ),
    ] = None,
    repair_router: Annotated[
        bool,
        typer.Option("--repair-router", help="compensate the router for the smoothed norms of the experts' checkpoint"),
    ] = False,
    facts: FactsOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Build a mixed checkpoint from existing experts.

    Everything else comes from the FP8 source. Exit 3 if its router is uncompensated.

    Example: quantize stitch --source models/tiny-minimax-m2 --experts out/awq --output out/mixed --repair-router
    """
    from quantizers.checkpoint.reader import open_checkpoint
    from quantizers.cli.tables.commands import stitch_table
    from quantizers.device.devices import choose_device
    from quantizers.pipeline.stitched import stitch as stitch_both
    from quantizers.recipe.portable import source_name
    from quantizers.system.interrupts import interruptible

    refuse_unfinished_runs([source, experts])
    if output is None:
        output = default_output(f"{Path(source_name(experts, Path.cwd())).name}-stitched")
    opened, packed = open_checkpoint(source), open_checkpoint(experts)
    with interruptible("give the same command again to go on") as check:
        report = stitch_both(
            opened,
            packed,
            output,
            choose_device(device),
            repair_router=repair_router,
            check=check,
            own=facts,
            command=typed(),
        )
    location = os.path.relpath(opened.folder) if Path(source).expanduser().is_dir() else source  # a Hub id as it is
    emit(report, as_json, stitch_table(report, output, location))
    if not all(gate["passed"] for gate in report["gates"]):
        raise typer.Exit(GATE_FAILED)
