"""`quantize coverage` and `quantize eval`: parse, call, print, exit code."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_line import GATE_FAILED, DebugOption, DeviceOption, JsonOption, SourceOption, emit
from .errors import InputError
from .ranks import ALONE, Ranks

NoPictureOption = Annotated[bool, typer.Option("--no-picture", help="draw nothing")]
WorkOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="where hidden states lie meanwhile; a temporary folder by default")
]


def _set_file(name: str) -> Path:
    from .shipped import find

    path = find(name, "calibration")
    if not path.is_file():
        raise InputError(f"{name}: no such set; give a file, or the name of a shipped set such as held-out")
    return path


def coverage(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="its source, calibration set and gates are used")
    ] = None,
    source: SourceOption = None,
    model: Annotated[str | None, typer.Option(help="instead of a recipe: a checkpoint's folder or Hub id")] = None,
    data: Annotated[str | None, typer.Option(metavar="SET", help="instead of a recipe's: a calibration set")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="SET_A SET_B", help="which experts the second set wins and loses")
    ] = None,
    min_routed_tokens: Annotated[int | None, typer.Option(min=0, help="gate without a recipe; 1 by default")] = None,
    max_uncovered: Annotated[
        float | None, typer.Option(min=0, max=1, help="gate without a recipe: share of experts; 0.01 by default")
    ] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="layers by experts")] = Path("coverage.png"),
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: WorkOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count the tokens that the router sends to each expert, without quantizing; exit 3 when a gate fails.

    Example: quantize coverage tiny-minimax-m2-fp8-int4
    """
    from eval.coverage_run import asked, compared, measured

    from .devices import choose_device

    question = asked(recipe, model, data, compare, min_routed_tokens, max_uncovered, source)
    ranks: Ranks = context.obj or ALONE
    with _work(work, ranks) as folder:
        answer = compared if compare else measured
        found = answer(question, choose_device(device, ranks), folder, ranks)
    if not ranks.leads:
        return
    if compare:
        from eval.coverage_report import compare_table

        emit(found, as_json, compare_table(found))
        return
    from eval.coverage_report import coverage_table

    text = coverage_table(found)
    if not no_picture:
        import numpy as np

        from eval.measure_pictures import coverage_picture

        totals = np.array([layer["routed_tokens"] for layer in found["per_layer"]])
        coverage_picture(totals, found["min_routed_tokens"], f"{Path(found['model']).name} on {found['set']}", picture)
        text += f"\n\npicture: {picture}"
    emit(found, as_json, text)
    if not all(gate["passed"] for gate in found["gates"]):
        raise typer.Exit(GATE_FAILED)


@contextlib.contextmanager
def _work(folder: Path | None, ranks: Ranks) -> Iterator[Path]:
    """A temporary folder in `folder`, of rank 0 and for all of them."""
    if not ranks.leads:
        yield Path(ranks.hear("work"))
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        ranks.tell("work", inner)
        yield Path(inner)


def evaluate(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="a folder or Hub id")],
    candidate: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE…", help="one or more checkpoints of the same model")
    ],
    data: Annotated[str, typer.Option(metavar="SET", help="a held-out set: a file, or the name of a shipped one")],
    picture: Annotated[Path, typer.Option(metavar="FILE", help="KL by category, errors by depth")] = Path(
        "fidelity.png"
    ),
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="keep hidden states and a journal here, and go on from what it holds"),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Perplexity, bits per byte, KL, top-1, routing and weights of candidates against a source, layer by layer.

    SOURCE and CANDIDATE may be FP8, BF16, an output of this program, or what compressed-tensors calls
    pack-quantized, int-quantized or float-quantized, made by whatever tool.

    Example: quantize eval models/tiny-minimax-m2 out/tiny --data held-out
    """
    from eval.perplexity_report import eval_table

    from .architecture import architecture_for, sizes_of
    from .checkpoint import open_checkpoint
    from .devices import choose_device, use_threads
    from .interrupts import interruptible
    from .journal import begun_with
    from .proof import EVALUATION, NOT_SIMULATED, measure

    ranks: Ranks = context.obj or ALONE
    data_set = _set_file(data)
    opened = ranks.after_first(lambda: [open_checkpoint(name) for name in (source, *candidate)])
    where = str(opened[0].folder / "config.json")
    sizes = sizes_of(architecture_for(opened[0].config, where), opened[0].config, where)
    began = begun_with(work / "evaluation", EVALUATION) if work else {}
    use_threads(sizes, began.get("threads"), ranks)
    advice = "give the same command again" + (" to go on" if work else "; with --work DIR it would go on")
    shared = _work(work, ranks) if work is None else contextlib.nullcontext(work)
    with shared as folder, interruptible(advice) as check:
        results = measure(
            opened[0], opened[1:], data_set, choose_device(device, ranks), folder / "evaluation", check,
            weights=True, resumable=work is not None, ranks=ranks,
        )  # fmt: skip
    if not ranks.leads:
        return
    report: dict[str, Any] = {
        "source": source,
        "candidates": [{"model": c} | r for c, r in zip(candidate, results, strict=True)],
        "notes": [NOT_SIMULATED],
    }
    text = eval_table(report)
    if not no_picture:
        from eval.measure_pictures import fidelity_picture

        fidelity_picture([(one["model"], one) for one in report["candidates"]], picture)
        text += f"\n\npicture: {picture}"
    emit(report, as_json, text)
