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
from quantizers.team.ranks import Ranks, from_environment, join

from . import bench, calibration, coverage, evaluate, plan, publish, recipes, report, run, stitch, verify

SEVERAL = {"run", "eval", "coverage"}  # commands that work with several processes, started by torchrun

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
app.add_typer(bench.bench, name="bench")


def main() -> None:
    """Entry point. Every error is printed as one line and gives an exit code; a traceback only with --debug."""
    _quiet()
    ranks = from_environment()
    try:
        with stoppable(), ordered():
            if ranks.several and not {*sys.argv[1:2]} <= SEVERAL:
                raise InputError("only run, eval and coverage work with several processes; start this without torchrun")
            ranks = join(ranks)
            code = app(prog_name="quantize", standalone_mode=False, obj=ranks) or 0  # typer.Exit is returned as a code
            ranks.finish()
            sys.exit(code)
    except typer.Abort:
        _end(ranks, "interrupted; give the same command again", 130)
    except QuantizeError as failure:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _end(ranks, str(failure), failure.exit_code)
    except Exception as failure:
        # typer bundles its own click under a private name, so click's errors are recognised by their method.
        if said := getattr(failure, "format_message", None):
            _end(ranks, said(), 2)
        if "--debug" in sys.argv:
            traceback.print_exc()
            _end(ranks, "", 1)
        first = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        _end(ranks, f"{type(failure).__name__}: {first} (a traceback with --debug)", 1)


def _end(ranks: Ranks, message: str, code: int) -> NoReturn:
    line, code = ranks.last_words(message, code)
    if line:
        print(f"quantize: {line}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
