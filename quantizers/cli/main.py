"""The `quantize` command: registers all commands, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from quantizers.device.determinism import ordered
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.interrupts import stoppable
from quantizers.team.joining import join, launched
from quantizers.team.team import Team

from . import calibration, coverage, evaluate, plan, publish, recipes, report, run, stitch, verify
from .options import emit

SEVERAL = {"run", "eval", "coverage"}  # commands that work with several processes

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from quantizers.device.environment import environment

        from .tables.commands import version_table

        found = environment()
        emit(found, "--json" in sys.argv, version_table(found))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="print the versions of this program, Python, torch and CUDA, and the devices found, and end",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", is_eager=True, help="with --version: one JSON object")] = False,
) -> None:
    """FP8 mixture-of-experts checkpoints to FP8 attention + INT4 experts, stitched byte for byte and proven."""
    if as_json:
        raise InputError("--json stands behind a command, as in `quantize plan RECIPE --json`")


def _quiet() -> None:
    """Keep libraries' progress bars and notes out of our output; their warnings and errors are still shown."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


app.command()(run.run)
app.command()(plan.plan)
app.command()(verify.verify)
app.command()(coverage.coverage)
app.command(name="eval")(evaluate.evaluate)
app.command()(stitch.stitch)
app.command()(report.report)
app.command()(publish.publish)
app.add_typer(recipes.recipes, name="recipes")
app.command()(recipes.new)
app.add_typer(calibration.calibration, name="calibration")


def main() -> None:
    """Entry point. Every error is printed as one line and gives an exit code; a traceback only with --debug."""
    _quiet()
    team = Team()
    try:
        with stoppable(), ordered():
            if launched() and not {*sys.argv[1:2]} <= SEVERAL:
                raise InputError("only run, eval and coverage work with several processes; start this by itself")
            team = join()
            code = app(prog_name="quantize", standalone_mode=False, obj=team) or 0  # typer.Exit is returned as a code
            team.finish()
            sys.exit(code)
    except typer.Abort:
        _end(team, "interrupted; give the same command again", 130)
    except QuantizeError as failure:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _end(team, str(failure), failure.exit_code)
    except Exception as failure:
        # typer bundles its own click under a private name, so click's errors are recognised by their method.
        if said := getattr(failure, "format_message", None):
            if type(failure).__name__ == "NoArgsIsHelpError":
                print(said(), file=sys.stderr)  # the help of a command that was given nothing
                sys.exit(2)
            _end(team, said(), 2)
        if "--debug" in sys.argv:
            traceback.print_exc()
            _end(team, "", 1)
        first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        _end(team, f"{type(failure).__name__}: {first} (a traceback with --debug)", 1)


def _end(team: Team, message: str, code: int) -> NoReturn:
    line, code = team.last_words(message, code)
    process = launched()
    if process and not team.several and process[0]:
        line = None  # before the processes knew each other: rank 0 says the same
    for one in line.split("\n") if line else ():  # a line for each mistake
        print(f"quantize: {one}", file=sys.stderr)
    if team.several:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # torch's groups would wait for the processes that are lost
    sys.exit(code)


if __name__ == "__main__":
    main()
