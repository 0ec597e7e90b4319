"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantizers.team.team import ALONE, Team

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
    TrustOption,
    WorkOption,
    emit,
    refuse_unfinished_runs,
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
        tuple[str, str] | None,
        typer.Option(metavar="SET_A SET_B", help="two sets: whose share of the tokens grows or shrinks, won and lost"),
    ] = None,
    min_routed_tokens: Annotated[int | None, typer.Option(min=0, help="gate without a recipe; 1 by default")] = None,
    max_uncovered: Annotated[
        float | None, typer.Option(min=0, max=1, help="gate without a recipe: share of experts; 0.01 by default")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="layers by experts; coverage.png by default, or coverage-compare.png"),
    ] = None,
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: WorkOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count the tokens that the router sends to each expert, without quantizing; exit 3 when a gate fails.

    Example: quantize coverage tiny-minimax-m2-fp8-int4
    """
    from eval.coverage.compare import compare_table
    from eval.coverage.measure import compare_coverage, measure_coverage, question_of
    from eval.coverage.tables import coverage_table
    from eval.report.plot_style import save
    from eval.report.plots import comparison_figure, coverage_figure
    from quantizers.device.devices import choose_device
    from quantizers.recipe.changes import changes_of

    refuse_unfinished_runs(one for one in (source, model) if one)
    question = question_of(
        recipe,
        model,
        data,
        compare,
        min_routed_tokens=min_routed_tokens,
        max_uncovered=max_uncovered,
        source=source,
        own=facts,
        trust_remote_code=trust_remote_code,
        changes=changes_of(settings or (), calibration),
    )
    team: Team = context.obj or ALONE
    with shared_folder(work, team) as folder:
        answer = compare_coverage if compare else measure_coverage
        result = answer(question, choose_device(device, team), folder, team)
    if not team.leads:
        return
    text = (compare_table if compare else coverage_table)(result)
    if not no_picture:
        model = Path(result["model"]).name
        if compare:
            picture = picture or Path("coverage-compare.png")
            save(comparison_figure(result, model), picture)
        else:
            picture = picture or Path("coverage.png")
            title = f"{model} on {result['set']}"
            save(coverage_figure(result["per_layer"], result["min_routed_tokens"], title), picture)
        text += f"\n\npicture: {picture}"
    emit(result, as_json, text)
    if not compare and not all(gate["passed"] for gate in result["gates"]):
        raise typer.Exit(GATE_FAILED)
