"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from quantizers.distributed.process_group import ProcessGroup

from . import common


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
    from quantizers.commands.coverage import coverage as count_tokens
    from quantizers.eval.coverage.compare import compare_table
    from quantizers.eval.coverage.figures import CoverageComparison, CoverageReport
    from quantizers.eval.coverage.saliency import saliency_table
    from quantizers.eval.coverage.summary import coverage_table
    from quantizers.eval.report.plots import comparison_figure, coverage_figure, saliency_figure, save

    dist: ProcessGroup = context.obj
    output = output or (Path("saliency") if saliency else None)
    found = count_tokens(**common.given(context) | {"output": output}, dist=dist)
    if not dist.is_main:
        return
    if compare:
        change = CoverageComparison.model_validate(found.figures)
        text, figure = compare_table(change), None if no_picture else comparison_figure(change, Path(change.model).name)
    else:
        report = CoverageReport.model_validate(found.figures)
        title = f"{Path(report.model).name} on {report.set}"
        text = coverage_table(report)
        figure = None if no_picture else coverage_figure(report.per_layer, report.min_routed_tokens, title)
        if report.saliency:
            text += "\n\n" + saliency_table(report.saliency)
    if figure is not None:
        picture = picture or Path("coverage-compare.png" if compare else "coverage.png")
        save(figure, picture)
        text += f"\n\npicture: {picture}"
        if not compare and report.saliency and output:
            save(saliency_figure(report.per_layer, report.saliency.per_layer, title), output / "saliency.png")
    if output:
        text += f"\n\nscores and lists of experts: {output}"
    common.emit(found.figures, as_json, text, passed=found.passed)
