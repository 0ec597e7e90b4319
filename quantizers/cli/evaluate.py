"""`quantize eval`: parse, call, print, exit code."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup

from .options import (
    DebugOption,
    DeviceOption,
    FactsOption,
    JsonOption,
    NoPictureOption,
    TrustOption,
    emit,
    find_set,
    refuse_unfinished_runs,
    temporary_folder,
)


def evaluate(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a folder or Hub id")],
    candidate: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE…", help="one or more checkpoints of the same model")
    ],
    data: Annotated[str, typer.Option(metavar="SET", help="evaluation set: a file, or the name of a shipped set")],
    facts: FactsOption = None,
    picture: Annotated[
        Path, typer.Option(metavar="FILE", help="file for the plot of KL by category and errors by depth")
    ] = Path("fidelity.png"),
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="folder for activations and a journal; an interrupted evaluation resumes from it"
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure perplexity, KL and more of candidates against a source.

    Also bits per byte, top-1 and router agreement, and the error of weights; one layer is in memory at a time.
    With several candidates also the paired difference of each to the first, with confidence intervals.

    SOURCE and CANDIDATE may be FP8, BF16, an output of this program, what compressed-tensors calls pack-quantized,
    int-quantized or float-quantized, made by any tool, or a checkpoint of AutoAWQ, GPTQ (GPTQModel, AutoGPTQ) or
    AutoRound.

    Example: quantize eval models/tiny-minimax-m2 out/tiny --data held-out
    """
    from eval.fidelity.paired import NOTE, paired
    from eval.fidelity.tables import eval_table
    from quantizers.architectures.families import architecture_for
    from quantizers.architectures.sizes import sizes_of
    from quantizers.checkpoint.reader import open_checkpoint
    from quantizers.device.devices import choose_device, use_threads
    from quantizers.output.fingerprint import begun_with
    from quantizers.output.manifest import carried_facts
    from quantizers.pipeline.measure import EVALUATION, measure
    from quantizers.pipeline.report import NOT_SIMULATED
    from quantizers.system.interrupts import interruptible

    dist: ProcessGroup = context.obj or SINGLE_PROCESS
    refuse_unfinished_runs([source, *candidate])
    data_set = find_set(data, "held-out")
    opened = dist.in_turn(lambda: [open_checkpoint(name) for name in (source, *candidate)])
    own = facts or next(filter(None, (carried_facts(one.folder) for one in opened[1:])), None)
    if own is not None and facts is None and dist.is_main:
        print(f"facts: {own}", file=sys.stderr, flush=True)
    where = str(opened[0].folder / "config.json")
    sizes = sizes_of(architecture_for(opened[0].config, where, own), opened[0].config, where)
    settings = begun_with(work / "evaluation", EVALUATION) if work else {}
    use_threads(sizes, dist.broadcast_object(settings.get("threads")), dist)
    advice = "give the same command again" + (" to resume" if work else "; with --work DIR it would resume")
    opened_folder = temporary_folder(None) if work is None else contextlib.nullcontext(work)
    with opened_folder as folder, interruptible(advice) as interrupt:
        check = dist.watch(interrupt)
        results = measure(
            opened[0], opened[1:], data_set, choose_device(device, dist), folder / "evaluation", check,
            weights=True, resumable=work is not None, trust_remote_code=trust_remote_code, dist=dist, own=own,
        )  # fmt: skip
    if not dist.is_main:
        return
    report: dict[str, Any] = {
        "source": source,
        "candidates": [{"model": c} | r for c, r in zip(candidate, results, strict=True)],
        "notes": [NOT_SIMULATED],
    }
    if len(candidate) > 1:
        report["paired"] = [
            {"model": name, "against": candidate[0], "note": NOTE} | paired(results[0], result)
            for name, result in zip(candidate[1:], results[1:], strict=True)
        ]
    text = eval_table(report)
    if not no_picture:
        from eval.report.plot_style import save
        from eval.report.plots import fidelity_figure

        title = f"against {Path(source).name} on {results[0]['evaluated_on']['name']}"
        save(fidelity_figure([(one["model"], one) for one in report["candidates"]], title), picture)
        text += f"\n\npicture: {picture}"
    emit(report, as_json, text)
