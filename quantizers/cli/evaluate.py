"""`quantize eval`: parse, call, print, exit code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from . import common
from .adapter import Call, command

if TYPE_CHECKING:
    from quantizers.commands.evaluate import Evaluation


@command("quantizers.commands.evaluate:evaluate", before={"picture": "device", "no_picture": "device"})
def evaluate(
    call: Call,
    picture: Annotated[
        Path | None,
        Option(metavar="FILE", help="file for the plot of KL by category and errors by depth; fidelity.png by default"),
    ] = None,
    no_picture: common.NoPicture = False,
) -> None:
    """Measure perplexity, KL and more of candidates against a source.

    Also bits per byte, top-1 and router agreement, and the error of weights; one layer is in memory at a time.
    With several candidates also the paired difference of each to the first, with confidence intervals.

    SOURCE and CANDIDATE may be FP8, BF16, an output of this program, what compressed-tensors calls pack-quantized,
    int-quantized or float-quantized, made by any tool, or a checkpoint of AutoAWQ, GPTQ (GPTQModel, AutoGPTQ) or
    AutoRound.

    Example: quantize eval tiny-minimax-m2 out/tiny --data held-out
    """
    from quantizers.eval.fidelity.figures import EvalReport
    from quantizers.eval.fidelity.tables import eval_table

    file = common.picture_file(picture, "fidelity.png", call.dist, unwanted=no_picture)
    evaluation: Evaluation = call()
    if not call.dist.is_main:
        return
    report = EvalReport.model_validate(evaluation.as_dict())
    pictures = {}
    if file:
        from quantizers.eval.report.plots import fidelity_figure

        results = [(candidate.model, candidate) for candidate in report.candidates]
        title = f"against {Path(call.options['source']).name} on {report.candidates[0].evaluated_on.name}"
        pictures[file] = partial(fidelity_figure, results, title)
    common.emit(report.as_dict(), call.as_json, eval_table(report), pictures=pictures)
