"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.coverage import Coverage


@command("quantizers.commands.coverage:coverage", before={"picture": "device", "no_picture": "device"})
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
    from quantizers.eval.coverage.compare import compare_table
    from quantizers.eval.coverage.saliency import saliency_table
    from quantizers.eval.coverage.summary import coverage_table
    from quantizers.eval.report.plots import comparison_figure, coverage_figure, saliency_figure, saved

    compare, saliency = call.options["compare"], call.options["saliency"]
    output = call.options["output"] or (Path("saliency") if saliency else None)
    found: Coverage = call(output=output)
    if not call.dist.is_main:
        return
    result = found.figures
    text = (compare_table if compare else coverage_table)(result)
    if saliency:
        text += "\n\n" + saliency_table(result["saliency"])
    if not no_picture:
        name = Path(result["model"]).name
        if compare:
            default, figure = "coverage-compare.png", partial(comparison_figure, result, name)
        else:
            title = f"{name} on {result['set']}"
            counts = result["per_layer"], result["min_routed_tokens"]
            default, figure = "coverage.png", partial(coverage_figure, *counts, title)
        text += f"\n\n{saved(figure, picture or Path(default))}"
        if saliency and output:
            scored = result["per_layer"], result["saliency"]["per_layer"]
            saved(partial(saliency_figure, *scored, title), output / "saliency.png")
    if output:
        text += f"\n\nscores and lists of experts: {output}"
    common.emit(result, call.as_json, text, passed=found.passed)
