"""`quantize run`: parse, call, print, exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantizers.system.errors import InputError
from quantizers.team.team import ALONE, Team

from .options import (
    GATE_FAILED,
    CalibrationOption,
    DebugOption,
    DeviceMemoryOption,
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SetOption,
    SourceOption,
    asked,
    default_output,
    emit,
    keep_own_recipe,
    run_name,
    typed,
)

if TYPE_CHECKING:
    from quantizers.plan.job import Job


def run(
    *,
    context: typer.Context,
    recipe: RecipeArgument,
    folder: Annotated[Path | None, typer.Argument(metavar="OUTPUT", help="the same as --output")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="folder for the finished checkpoint, new, empty, or an unfinished run; out/<name of RECIPE> by "
            "default",
        ),
    ] = None,
    source: SourceOption = None,
    calibration: CalibrationOption = None,
    settings: SetOption = None,
    device: DeviceOption = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="discard what the folder holds of an earlier run, after asking")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    device_memory: DeviceMemoryOption = None,
    paranoid: Annotated[
        bool,
        typer.Option("--paranoid", help="hash the source's shards, and compare them whenever the run goes on"),
    ] = False,
    states: Annotated[
        Literal["auto", "memory", "files"],
        typer.Option(help="where calibration states lie: in memory, in files, or in memory where they fit"),
    ] = "auto",
    ignore_stop: Annotated[
        bool, typer.Option("--ignore-stop", help="go on after layers at which the recipe's verify.stop ends the run")
    ] = False,
    with_data: Annotated[
        bool,
        typer.Option("--with-data", help="copy local data files of the sets beside the checkpoint, to be published"),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Goes on by itself where it was cut off.

    torchrun --nproc-per-node N -m quantizers run … does it with N processes, on several machines too: the same bytes.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    from quantizers.output.fingerprint import begun_with
    from quantizers.output.journal import refuse_second_run, work_folder
    from quantizers.plan.job import prepare
    from quantizers.recipe.changes import changes_of
    from quantizers.recipe.read import find_recipe
    from quantizers.system.formatting import parse_bytes

    team: Team = context.obj or ALONE
    if folder is not None and output is not None and folder.absolute() != output.absolute():
        raise InputError(f"two outputs are given, {folder} and --output {output}; leave one out")
    output = output or folder
    changes = changes_of(settings or (), calibration)
    if output is None:
        output = default_output(run_name(find_recipe(recipe)), say=team.leads)

    def begin() -> Job:
        """Everything that may refuse, ask the user, or download; rank 0 does it first."""
        if team.leads:
            refuse_second_run(output)
        job = prepare(recipe, source_folder=source, changes=changes)
        if fresh and team.leads:
            from quantizers.output.journal import discard

            keep_own_recipe(job.path, output)
            if output.exists() and not yes and not asked(f"discard the run in {output}?", "--fresh"):
                raise InputError(f"{output}: left as it is; choose another --output")
            discard(output)
        return job

    limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
    job = team.in_turn(begin)
    from quantizers.device.devices import choose_device, use_threads
    from quantizers.run.finished import of_another_source
    from quantizers.run.options import Options
    from quantizers.run.pipeline import assist
    from quantizers.run.pipeline import run as run_job

    if team.leads and of_another_source(job):
        print(
            f"{job.path}: the checkpoint beside it was made from another source than {job.location}, so this will "
            "not give the same bytes",
            file=sys.stderr,
        )
    use_threads(job.sizes, team.tell(begun_with(work_folder(output)).get("threads")), team)
    options = Options(
        output,
        choose_device(device, team),
        limit,
        paranoid,
        with_data,
        states,
        ignore_stop,
        team,
        typed(),
    )
    if not team.leads:
        assist(job, options)
        return
    report = run_job(job, options)
    from quantizers.cli.tables.run import run_table

    emit(report, as_json, run_table(report, output, job.location, recipe))
    if not all(gate["passed"] for gate in report["gates"]):
        raise typer.Exit(GATE_FAILED)
