"""`quantize coverage`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup

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
    temporary_folder,
)


def coverage(
    *,
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="recipe whose source, calibration set and gates are used")
    ] = None,
    source: SourceOption = None,
    calibration: CalibrationOption = None,
    settings: SetOption = None,
    facts: FactsOption = None,
    model: Annotated[str | None, typer.Option(help="without a recipe: a checkpoint's folder or Hub id")] = None,
    data: Annotated[str | None, typer.Option(metavar="SET", help="without a recipe: a calibration set")] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="SET_A SET_B",
            help="compare two sets: experts whose share of tokens grows or shrinks, newly covered or no longer covered",
        ),
    ] = None,
    min_routed_tokens: Annotated[int | None, typer.Option(min=0, help="without a recipe: gate; 1 by default")] = None,
    max_uncovered: Annotated[
        float | None, typer.Option(min=0, max=1, help="without a recipe: gate, a share of experts; 0.01 by default")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="file for the heat map of layers by experts; coverage.png or coverage-compare.png by default",
        ),
    ] = None,
    no_picture: NoPictureOption = False,
    device: DeviceOption = "auto",
    work: WorkOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count the tokens routed to each expert, without quantizing.

    Exit 3 if a gate fails.

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
    dist: ProcessGroup = context.obj or SINGLE_PROCESS
    with temporary_folder(work) as folder:
        answer = compare_coverage if compare else measure_coverage
        result = answer(question, choose_device(device, dist), folder, dist)
    if not dist.is_main:
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
