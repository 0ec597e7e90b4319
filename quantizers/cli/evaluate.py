"""`quantize eval`: parse, call, print, exit code."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.team.team import ALONE, Team

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
    shared_folder,
)


def evaluate(
    *,
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a folder or Hub id")],
    candidate: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE…", help="one or more checkpoints of the same model")
    ],
    data: Annotated[str, typer.Option(metavar="SET", help="a held-out set: a file, or the name of a shipped one")],
    facts: FactsOption = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="KL by category, errors by depth")] = Path(
        "fidelity.png"
    ),
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="keep hidden states and a journal here, and go on from what it holds"),
    ] = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Perplexity, bits per byte, KL, top-1, routing and weights of candidates against a source, layer by layer.

    With several candidates also the difference of each to the first, paired over the texts, with intervals.

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
    from quantizers.run.measure import EVALUATION, measure
    from quantizers.run.report import NOT_SIMULATED
    from quantizers.system.interrupts import interruptible

    team: Team = context.obj or ALONE
    refuse_unfinished_runs([source, *candidate])
    data_set = find_set(data, "held-out")
    opened = team.in_turn(lambda: [open_checkpoint(name) for name in (source, *candidate)])
    own = facts or next(filter(None, (carried_facts(one.folder) for one in opened[1:])), None)
    if own is not None and facts is None and team.leads:
        print(f"facts: {own}", file=sys.stderr, flush=True)
    where = str(opened[0].folder / "config.json")
    sizes = sizes_of(architecture_for(opened[0].config, where, own), opened[0].config, where)
    settings = begun_with(work / "evaluation", EVALUATION) if work else {}
    use_threads(sizes, team.tell(settings.get("threads")), team)
    advice = "give the same command again" + (" to go on" if work else "; with --work DIR it would go on")
    shared = shared_folder(work, team) if work is None else contextlib.nullcontext(work)
    with shared as folder, interruptible(advice) as interrupt:
        check = team.heed(interrupt)
        results = measure(
            opened[0], opened[1:], data_set, choose_device(device, team), folder / "evaluation", check,
            weights=True, resumable=work is not None, trust_remote_code=trust_remote_code, team=team, own=own,
        )  # fmt: skip
    if not team.leads:
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
