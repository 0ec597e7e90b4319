"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from quantizers.cli import common
from quantizers.cli.adapter import Call, command

if TYPE_CHECKING:
    from quantizers.sets.coverage import Coverage


@command("quantizers.sets.coverage:coverage", before={"picture": "device", "no_picture": "device"})
def coverage(
    call: Call,
    picture: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="file for the heat map of layers by experts; coverage.png or coverage-compare.png by default",
        ),
    ] = None,
    no_picture: common.NoPicture = False,
) -> None:
    """Count the tokens routed to each expert, without quantizing.

    Exit 3 if a gate fails.

    Example: quantize coverage tiny-minimax-m2-fp8-int4
    """
    from quantizers.eval.coverage.figures import CoverageComparison, CoverageReport
    from quantizers.eval.coverage.summary import coverage_table
    from quantizers.eval.report.plots import comparison_figure, coverage_figure, saliency_figure
    from quantizers.sets.coverage_change import compare_table
    from quantizers.sets.saliency import saliency_table

    compare, saliency = call.options["compare"], call.options["saliency"]
    output = call.options["output"] or (Path("saliency") if saliency else None)
    file = common.picture_file(
        picture, "coverage-compare.png" if compare else "coverage.png", call.dist, unwanted=no_picture
    )
    counted: Coverage = call(output=output)
    if not call.dist.is_main:
        return
    pictures = dict[Path, Callable[[], Any]]()
    if compare:
        change = CoverageComparison.model_validate(counted.figures)
        text, figure = compare_table(change), partial(comparison_figure, change, Path(change.model).name)
    else:
        report = CoverageReport.model_validate(counted.figures)
        title = f"{Path(report.model).name} on {report.set}"
        text = coverage_table(report)
        figure = partial(coverage_figure, report.per_layer, report.min_routed_tokens, title)
        if report.saliency:
            text += "\n\n" + saliency_table(report.saliency)
            if file and output:
                scored = report.per_layer, report.saliency.per_layer
                pictures[output / "saliency.png"] = partial(saliency_figure, *scored, title)
    if output:
        text += f"\n\nscores and lists of experts: {output}"
    if file:
        pictures[file] = figure
    common.emit(counted.figures, call.as_json, text, passed=counted.passed, pictures=pictures)
