"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from quantizers.cli import common
from quantizers.distributed.process_group import ProcessGroup


def coverage(
    *,
    context: Context,
    recipe: Annotated[
        str | None, Argument(metavar="[RECIPE]", help="recipe whose source, calibration set and gates are used")
    ] = None,
    source: common.Source = None,
    calibration: common.Calibration = None,
    settings: common.Settings = None,
    facts: common.Facts = None,
    model: common.Model = None,
    data: common.Data = None,
    compare: Annotated[
        tuple[str, str] | None,
        Option(
            metavar="SET_A SET_B",
            help="compare two sets: experts whose share of tokens grows or shrinks, newly covered or no longer covered",
        ),
    ] = None,
    saliency: Annotated[
        bool,
        Option(
            "--saliency",
            help="score the experts by what they contribute (REAP), by category too; writes scores, a heat map and "
            "lists of experts",
        ),
    ] = False,
    output: Annotated[
        Path | None, common.output("folder for the files of --saliency; saliency by default", "DIR")
    ] = None,
    min_routed_tokens: Annotated[int | None, Option(min=0, help="without a recipe: gate; 1 by default")] = None,
    max_uncovered: Annotated[
        float | None, Option(min=0, max=1, help="without a recipe: gate, a share of experts; 0.01 by default")
    ] = None,
    picture: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="file for the heat map of layers by experts; coverage.png or coverage-compare.png by default",
        ),
    ] = None,
    no_picture: common.NoPicture = False,
    device: common.Device = "auto",
    work: common.Scratch = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Count the tokens routed to each expert, without quantizing.

    Exit 3 if a gate fails.

    Example: quantize coverage tiny-minimax-m2-fp8-int4
    """
    from quantizers.eval.coverage.summary import coverage_table
    from quantizers.eval.report.plots import comparison_figure, coverage_figure, saliency_figure, save
    from quantizers.sets.coverage import coverage as count_tokens
    from quantizers.sets.coverage_change import compare_table
    from quantizers.sets.saliency import saliency_table

    dist: ProcessGroup = context.obj
    output = output or (Path("saliency") if saliency else None)
    found = count_tokens(**common.given(context) | {"output": output}, dist=dist)
    if not dist.is_main:
        return
    result = found.figures
    text = (compare_table if compare else coverage_table)(result)
    if saliency:
        text += "\n\n" + saliency_table(result["saliency"])
    if not no_picture:
        name = Path(result["model"]).name
        if compare:
            default, figure = "coverage-compare.png", comparison_figure(result, name)
        else:
            title = f"{name} on {result['set']}"
            default, figure = "coverage.png", coverage_figure(result["per_layer"], result["min_routed_tokens"], title)
        picture = picture or Path(default)
        save(figure, picture)
        text += f"\n\npicture: {picture}"
        if saliency and output:
            save(saliency_figure(result["per_layer"], result["saliency"]["per_layer"], title), output / "saliency.png")
    if output:
        text += f"\n\nscores and lists of experts: {output}"
    common.emit(result, as_json, text, passed=found.passed)
