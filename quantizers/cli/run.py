"""`quantize run`: parse, call, print, exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import InputError

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
    from quantizers.planning.job import Job


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
        bool, typer.Option("--fresh", help="discard an earlier run in the output folder, after asking")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    device_memory: DeviceMemoryOption = None,
    paranoid: Annotated[
        bool,
        typer.Option("--paranoid", help="hash the source's shards, and check them again on resume"),
    ] = False,
    states: Annotated[
        Literal["auto", "memory", "files"],
        typer.Option(help="keep calibration activations in memory, in files, or in memory if they fit"),
    ] = "auto",
    ignore_stop: Annotated[
        bool, typer.Option("--ignore-stop", help="ignore the recipe's verify.stop and continue")
    ] = False,
    with_data: Annotated[
        bool,
        typer.Option("--with-data", help="copy the sets' local data files into the output, for publishing"),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Resumes automatically if interrupted.

    torchrun --nproc-per-node N -m quantizers run … uses N processes, on one or several machines, with the same output.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    from quantizers.output.fingerprint import begun_with
    from quantizers.output.journal import refuse_second_run, work_folder
    from quantizers.recipe.changes import changes_of
    from quantizers.recipe.read import find_recipe
    from quantizers.system.formatting import parse_bytes

    dist: ProcessGroup = context.obj or SINGLE_PROCESS
    if folder is not None and output is not None and folder.absolute() != output.absolute():
        raise InputError(f"two outputs are given, {folder} and --output {output}; leave one out")
    output = output or folder
    changes = changes_of(settings or (), calibration)
    path = find_recipe(recipe)  # before what takes longer to import
    from quantizers.planning.job import prepare

    if output is None:
        output = default_output(run_name(path), say=dist.is_main)

    def begin() -> Job:
        """Everything that may refuse, ask the user, or download; rank 0 does it first."""
        if dist.is_main:
            refuse_second_run(output)
        job = prepare(recipe, source_folder=source, changes=changes)
        if fresh and dist.is_main:
            from quantizers.output.journal import discard

            keep_own_recipe(job.path, output)
            if output.exists() and not yes and not asked(f"discard the run in {output}?", "--fresh"):
                raise InputError(f"{output}: left as it is; choose another --output")
            discard(output)
        return job

    limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
    job = dist.in_turn(begin)
    from quantizers.device.devices import choose_device, use_threads
    from quantizers.pipeline.finished import of_another_source
    from quantizers.pipeline.options import Options
    from quantizers.pipeline.pipeline import assist
    from quantizers.pipeline.pipeline import run as run_job

    if dist.is_main and of_another_source(job):
        print(
            f"{job.path}: the checkpoint beside it was made from another source than {job.location}, so this will "
            "not give the same bytes",
            file=sys.stderr,
        )
    use_threads(job.sizes, dist.broadcast_object(begun_with(work_folder(output)).get("threads")), dist)
    options = Options(
        output,
        choose_device(device, dist),
        limit,
        paranoid,
        with_data,
        states,
        ignore_stop,
        dist,
        typed(),
    )
    if not dist.is_main:
        assist(job, options)
        return
    report = run_job(job, options)
    from quantizers.cli.tables.run import run_table

    emit(report, as_json, run_table(report, output, job.location, recipe))
    if not all(gate["passed"] for gate in report["gates"]):
        raise typer.Exit(GATE_FAILED)
