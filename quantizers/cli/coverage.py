"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantizers.team.ranks import ALONE, Ranks

from .options import (
    GATE_FAILED,
    CalibrationOption,
    DebugOption,
    DeviceOption,
    FactsOption,
    JsonOption,
    NoPictureOption,
    SetOption,
    SourceOption,
    WorkOption,
    emit,
    shared_folder,
)


def coverage(
    *,
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="its source, calibration set and gates are used")
    ] = None,
    source: SourceOption = None,
    calibration: CalibrationOption = None,
    settings: SetOption = None,
    facts: FactsOption = None,
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
    from eval.coverage.measure import compare_coverage, measure_coverage, question_of
    from quantizers.device.devices import choose_device
    from quantizers.recipe.changes import changes_of

    question = question_of(
        recipe,
        model,
        data,
        compare,
        min_routed_tokens=min_routed_tokens,
        max_uncovered=max_uncovered,
        source=source,
        own=facts,
        changes=changes_of(settings or (), calibration),
    )
    ranks: Ranks = context.obj or ALONE
    with shared_folder(work, ranks) as folder:
        answer = compare_coverage if compare else measure_coverage
        result = answer(question, choose_device(device, ranks), folder, ranks)
    if not ranks.leads:
        return
    if compare:
        from eval.coverage.tables import compare_table

        emit(result, as_json, compare_table(result))
        return
    from eval.coverage.tables import coverage_table

    text = coverage_table(result)
    if not no_picture:
        from eval.report.pictures import coverage_picture

        title = f"{Path(result['model']).name} on {result['set']}"
        coverage_picture(result["per_layer"], result["min_routed_tokens"], title, picture)
        text += f"\n\npicture: {picture}"
    emit(result, as_json, text)
    if not all(gate["passed"] for gate in result["gates"]):
        raise typer.Exit(GATE_FAILED)
