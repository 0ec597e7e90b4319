"""The commands: parse, call, print, exit code. No logic, and no heavy import before it is needed."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from . import commands_bench, commands_measure, commands_plan, commands_publish, commands_recipes, commands_verify
from .command_line import (
    GATE_FAILED,
    DebugOption,
    DeviceMemoryOption,
    DeviceOption,
    JsonOption,
    RecipeArgument,
    SourceOption,
    default_output,
    emit,
    show_rich,
)
from .determinism import ordered
from .errors import InputError, QuantizeError
from .interrupts import stoppable
from .ranks import ALONE, Ranks, from_environment, join

if TYPE_CHECKING:
    from .session import Job

SEVERAL = {"run", "eval", "coverage"}  # commands that torchrun may start

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"quantize {version('moe-quantizers')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version, and end")
    ] = False,
) -> None:
    """FP8 mixture-of-experts checkpoints to FP8 attention + INT4 experts, stitched byte for byte and proven."""


def _quiet() -> None:
    """Keep libraries' chatter out of our output; warnings and errors still come through."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@app.command()
def run(
    context: typer.Context,
    recipe: RecipeArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            help="folder for the finished checkpoint, new, empty, or an unfinished run; out/<name of RECIPE> by default"
        ),
    ] = None,
    source: SourceOption = None,
    device: DeviceOption = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="discard what the folder holds of an earlier run, after asking")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    device_memory: DeviceMemoryOption = None,
    paranoid: Annotated[
        bool,
        typer.Option("--paranoid", help="hash the source's and the finished shards whenever the run goes on"),
    ] = False,
    with_data: Annotated[
        bool,
        typer.Option("--with-data", help="copy local data files of the sets beside the checkpoint, to be published"),
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Quantize a checkpoint, stitch it, verify and measure it. Goes on by itself where it was cut off.

    torchrun --nproc-per-node N -m quantizers run … does it with N processes: the same bytes, sooner.

    Example: quantize run tiny-minimax-m2-fp8-int4 --output out/tiny
    """
    from .byte_size import parse_bytes
    from .journal import begun_with, refuse_second_run, work_folder
    from .recipe import find_recipe
    from .session import prepare

    ranks: Ranks = context.obj or ALONE
    if output is None:
        output = default_output(find_recipe(recipe).stem, say=ranks.leads)

    def begin() -> Job:
        """All that may refuse, ask, or load; rank 0 goes first."""
        if ranks.leads:
            refuse_second_run(output)
        job = prepare(recipe, source_folder=source)
        if fresh and ranks.leads:
            from .journal import discard

            if output.exists() and not yes and not typer.confirm(f"discard the run in {output}?", err=True):
                raise InputError(f"{output}: left as it is; give --output another folder")
            discard(output)
        return job

    limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
    job = ranks.after_first(begin)
    from .devices import choose_device, use_threads
    from .pipeline import Options, assist
    from .pipeline import run as run_job

    use_threads(job.sizes, begun_with(work_folder(output)).get("threads"), ranks)
    options = Options(output, choose_device(device, ranks), limit, paranoid, with_data, ranks)
    if not ranks.leads:
        assist(job, options)
        return
    report = run_job(job, options)
    from .tables import run_table

    # A Hub id stays what it is.
    found = os.path.relpath(job.location) if Path(job.location).is_dir() else job.location
    emit(report, as_json, run_table(report, output, found))
    if not all(gate["passed"] for gate in report["gates"]):
        raise typer.Exit(GATE_FAILED)


app.command()(commands_plan.plan)


app.command()(commands_verify.verify)
app.command()(commands_measure.coverage)
app.command(name="eval")(commands_measure.evaluate)
app.command()(commands_verify.stitch)
app.command()(commands_verify.report)
app.command()(commands_publish.publish)
app.add_typer(commands_recipes.recipes, name="recipes")
app.command()(commands_recipes.new)


@app.command()
def calibration(
    words: Annotated[
        list[str],
        typer.Argument(metavar="SET | lock SET | diff SET SET", help="a set's file, or the name of a shipped one"),
    ],
    tokenizer: Annotated[str | None, typer.Option(help="a model's folder or Hub id; the tiny model by default")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="a set that shares no text with it; held-out.yaml beside it by default")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="print so many rendered samples, evenly spread")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="sources loaded at the same time")] = 8,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check what a calibration set holds; exit 3 when a language is missing or texts are duplicates.

    `lock SET` writes the exact version of every source beside the set; `diff SET SET` compares two.

    Example: quantize calibration embedded
    """
    from .commands import check_calibration, diff_calibration, lock_calibration
    from .shipped import shipped

    verb, *sets = words
    if verb == "lock" and len(sets) == 1:
        report, shown = lock_calibration(sets[0], workers)
    elif verb == "diff" and len(sets) == 2:
        report, shown = diff_calibration(*sets)
    elif not sets:
        model = tokenizer or str(shipped("models") / "tiny-minimax-m2")
        report, shown = check_calibration(verb, model, held_out, show, workers)
    else:
        raise InputError(f"calibration {' '.join(words)}: give SET, `lock SET`, or `diff SET SET`")
    show_rich(report, as_json, shown)
    if not report.get("ok", True):
        raise typer.Exit(GATE_FAILED)


app.add_typer(commands_bench.bench, name="bench")


def main() -> None:
    """Entry point: every error of ours is one line and an exit code; a traceback only with --debug."""
    _quiet()
    ranks = from_environment()
    try:
        with stoppable(), ordered():
            if ranks.several and not {*sys.argv[1:2]} <= SEVERAL:
                raise InputError("only run, eval and coverage work with several processes; start this without torchrun")
            ranks = join(ranks)
            code = app(prog_name="quantize", standalone_mode=False, obj=ranks) or 0  # an Exit comes back as its code
            ranks.leave()
            sys.exit(code)
    except typer.Abort:
        _end(ranks, "interrupted; give the same command again", 130)
    except QuantizeError as failure:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _end(ranks, str(failure), failure.exit_code)
    except Exception as failure:
        # typer brings a click of its own, under no public name: its errors are known by what they have.
        if type(failure).__module__.startswith("click") or hasattr(failure, "format_message"):
            _end(ranks, failure.format_message(), 2)  # type: ignore[attr-defined]
        if "--debug" in sys.argv:
            traceback.print_exc()
            _end(ranks, "", 1)
        first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        _end(ranks, f"{type(failure).__name__}: {first} (a traceback with --debug)", 1)


def _end(ranks: Ranks, message: str, code: int) -> NoReturn:
    said, code = ranks.last_words(message, code)
    if said:
        print(f"quantize: {said}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
