"""`quantize imatrix`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from quantizers.cli import common
from quantizers.distributed.process_group import ProcessGroup


def imatrix(
    *,
    context: Context,
    recipe: Annotated[
        str | None, Argument(metavar="[RECIPE]", help="recipe whose source and calibration set are used")
    ] = None,
    output: Annotated[
        Path | None,
        common.output("the file; NAME.imatrix.gguf by default, after the recipe or the model", "FILE"),
    ] = None,
    tokens: Annotated[
        Literal["both", "routed", "all"],
        Option(
            help="of an expert: routed, those that the router sends to it, as llama.cpp counts; all, so that none is "
            "without data; both, all of them, where routed ones count more"
        ),
    ] = "both",
    source: common.Source = None,
    calibration: common.Calibration = None,
    settings: common.Settings = None,
    facts: common.Facts = None,
    model: common.Model = None,
    data: common.Data = None,
    device: common.Device = "auto",
    work: common.Scratch = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Write an importance matrix for llama.cpp's llama-quantize, from the source's activations.

    Example: quantize imatrix tiny-minimax-m2-fp8-int4 -o tiny.imatrix.gguf
    """
    from quantizers.llama_cpp.imatrix import imatrix as write
    from quantizers.llama_cpp.imatrix_file import imatrix_table

    dist: ProcessGroup = context.obj
    made = write(**common.given(context), dist=dist)
    if dist.is_main:
        common.emit(made.figures, as_json, imatrix_table(made.figures))
