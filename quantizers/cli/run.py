"""`quantize run`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Context, Option

from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import InputError

from . import common


def run(
    *,
    context: Context,
    recipe: common.Recipe,
    folder: Annotated[Path | None, Argument(metavar="OUTPUT", help="the same as --output")] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="folder for the finished checkpoint, new, empty, or an unfinished run; out/<name of RECIPE> by "
            "default",
        ),
    ] = None,
    source: common.Source = None,
    calibration: common.Calibration = None,
    without: common.Without = None,
    settings: common.Settings = None,
    device: common.Device = "auto",
    fresh: Annotated[bool, Option("--fresh", help="discard an earlier run in the output folder, after asking")] = False,
    yes: Annotated[bool, Option("--yes", help="do not ask")] = False,
    device_memory: common.DeviceMemory = None,
    paranoid: Annotated[
        bool, Option("--paranoid", help="hash the source's shards, and check them again on resume")
    ] = False,
    states: Annotated[
        Literal["auto", "memory", "files"],
        Option(help="keep calibration activations in memory, in files, or in memory if they fit"),
    ] = "auto",
    ignore_stop: Annotated[bool, Option("--ignore-stop", help="ignore the recipe's verify.stop and continue")] = False,
    ignore_source_check: Annotated[
        bool, Option("--ignore-source-check", help="quantize a source that makes no sense of text (random weights)")
    ] = False,
    with_data: Annotated[
        bool, Option("--with-data", help="copy the sets' local data files into the output, for publishing")
    ] = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Resumes automatically if interrupted.

    torchrun --nproc-per-node N -m quantizers run … uses N processes, on one or several machines, with the same output.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    from quantizers.commands.run import run as run_recipe
    from quantizers.system.formatting import parse_bytes

    dist: ProcessGroup = context.obj
    if folder is not None and output is not None and folder.absolute() != output.absolute():
        raise InputError(f"two outputs are given, {folder} and --output {output}; leave one out")
    output = output or folder
    discards = fresh and dist.is_main and output is not None and output.exists()
    if discards and not yes and not common.asked(f"discard the run in {output}?", "--fresh"):
        raise InputError(f"{output}: left as it is; choose another --output")
    made = run_recipe(
        recipe,
        output,
        source=source,
        calibration=calibration,
        without=without or (),
        settings=settings or (),
        device=device,
        device_memory=parse_bytes(device_memory, "--device-memory") if device_memory else None,
        fresh=fresh,
        paranoid=paranoid,
        states=states,
        ignore_stop=ignore_stop,
        ignore_source_check=ignore_source_check,
        with_data=with_data,
        command=common.typed(),
        dist=dist,
    )
    if not dist.is_main:
        return
    from .run_table import run_table  # imports pydantic and numpy

    common.emit(made.report, as_json, run_table(made.report, made.folder, made.source, recipe), passed=made.passed)
