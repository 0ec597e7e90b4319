"""`quantize stitch`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import GATE_FAILED, DebugOption, DeviceOption, FactsOption, JsonOption, emit, typed


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
    from quantizers.cli.tables.commands import stitch_table
    from quantizers.commands.stitch import stitch as stitch_both

    made = stitch_both(
        source, experts, output, repair_router=repair_router, facts=facts, device=device, command=typed()
    )
    emit(made.report, as_json, stitch_table(made.report, made.folder, made.source))
    if not made.passed:
        raise typer.Exit(GATE_FAILED)
