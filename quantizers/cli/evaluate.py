"""`quantize eval`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Option

from quantizers.distributed.process_group import ProcessGroup
from quantizers.recipe.schema import CARDS

from . import common


def evaluate(
    *,
    context: Context,
    source: Annotated[str, Argument(metavar="SOURCE", help="a folder or Hub id")],
    candidate: Annotated[list[str], Argument(metavar="CANDIDATE…", help="one or more checkpoints of the same model")],
    data: Annotated[str, Option(metavar="SET", help="evaluation set: a file, or the name of a shipped set")],
    as_served: Annotated[
        list[str] | None,
        Option(
            metavar="CARD",
            help="measure also as vLLM's kernels on this kind of card compute; may be repeated: " + ", ".join(CARDS),
        ),
    ] = None,
    facts: common.Facts = None,
    picture: Annotated[
        Path, Option(metavar="FILE", help="file for the plot of KL by category and errors by depth")
    ] = Path("fidelity.png"),
    no_picture: common.NoPicture = False,
    device: common.Device = "auto",
    work: Annotated[
        Path | None,
        Option(metavar="DIR", help="folder for activations and a journal; an interrupted evaluation resumes from it"),
    ] = None,
    stream: common.Stream = False,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Measure perplexity, KL and more of candidates against a source.

    Also bits per byte, top-1 and router agreement, and the error of weights; one layer is in memory at a time.
    With several candidates also the paired difference of each to the first, with confidence intervals.

    SOURCE and CANDIDATE may be FP8, BF16, an output of this program, what compressed-tensors calls pack-quantized,
    int-quantized or float-quantized, made by any tool, or a checkpoint of AutoAWQ, GPTQ (GPTQModel, AutoGPTQ) or
    AutoRound.

    Example: quantize eval tiny-minimax-m2 out/tiny --data held-out
    """
    from quantizers.commands.evaluate import evaluate as evaluate_candidates
    from quantizers.eval.fidelity.figures import EvalReport
    from quantizers.eval.fidelity.tables import eval_table

    dist: ProcessGroup = context.obj
    found = evaluate_candidates(candidates=candidate, **common.given(context), dist=dist)
    if not dist.is_main:
        return
    report = EvalReport.model_validate(found.as_dict())
    text = eval_table(report)
    if not no_picture:
        from quantizers.eval.report.plots import fidelity_figure, save

        evaluated_on = report.candidates[0].evaluated_on.name
        figure = fidelity_figure(
            [(candidate.model, candidate) for candidate in report.candidates],
            f"against {Path(source).name} on {evaluated_on}",
        )
        save(figure, picture)
        text += f"\n\npicture: {picture}"
    common.emit(report.as_dict(), as_json, text)
