"""The `quantize` command: registers all commands, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer
from typer.models import CommandInfo

from quantizers.device.determinism import ordered
from quantizers.distributed.process_group import ProcessGroup, launched
from quantizers.hooks import hooks
from quantizers.system.caches import settle_caches
from quantizers.system.errors import InputError, Interrupted, QuantizeError, first_line
from quantizers.system.files import system_error
from quantizers.system.formatting import gib, printable
from quantizers.system.interrupts import stoppable
from quantizers.system.streams import settle_names, settle_streams

from . import calibration, recipes
from .common import emit
from .doctor import doctor
from .evaluate import evaluate
from .plan import plan
from .publish import publish
from .report import report
from .run import run
from .verify import verify

# Commands in the order of `--help`, with those that rooms add; any other comes last.
ORDER = (
    "run", "plan", "doctor", "verify", "coverage", "imatrix", "compare", "eval", "serve-check", "stitch", "report",
    "publish", "new",
)  # fmt: skip
CALIBRATION_ORDER = ("check", "list", "copy", "new", "lock", "freeze", "diff", "schema", "why")

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        from quantizers.device.devices import environment

        about = environment()
        emit(about, "--json" in sys.argv, version_table(about))
        raise typer.Exit


def version_table(about: dict[str, Any]) -> str:
    """The program's version first, as scripts expect it; then what it runs on."""
    versions = dict(about["versions"])
    names = ("moe-quantizers", "moe-quantizers files", "python", "torch")
    own, files, python, torch = (versions.pop(name) for name in names)
    built = [f"{word} {about[key]}" for key, word in (("cuda", "CUDA"), ("rocm", "ROCm")) if about[key]]
    lines = [
        f"quantize {own} (files {files})",
        f"python {python}, torch {torch}, {built[0] if built else 'CPU build'}",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    for device in about["devices"]:
        kernels = f", kernels: {device['kernels']}" if "kernels" in device else ""
        lines.append(f"{device['device']}: {device['name']}, {gib(device['bytes'])}{kernels}")
    return "\n".join(lines)


BEGIN = """\
quantize makes mixture-of-experts checkpoints smaller: the routed experts become
INT4, everything else keeps its bytes, and the result is verified.

Next:
  quantize run tiny-minimax-m2-fp8-int4  try the tiny model: no GPU, no network
  quantize plan minimax-m2.1-fp8-int4    see what a real one needs
  quantize doctor                        check this machine

All commands: quantize --help"""


@app.callback()
def options(
    context: typer.Context,
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
    """FP8 mixture-of-experts checkpoints to FP8 attention + INT4 experts, with every passthrough byte verified."""
    if as_json:
        raise InputError("", "--json stands behind a command, as in `quantize plan RECIPE --json`")
    if context.invoked_subcommand is None:
        print(BEGIN)


def _sort(group: typer.Typer, order: tuple[str, ...]) -> None:
    """Put the commands of a group into an order of names."""

    def place(command: CommandInfo) -> int:
        assert command.callback is not None
        name = command.name or command.callback.__name__.replace("_", "-")
        return order.index(name) if name in order else len(order)

    group.registered_commands.sort(key=place)


for command in (run, plan, doctor, verify, evaluate, report, publish, recipes.new):
    app.command(name="eval" if command is evaluate else None)(command)
for add_commands in hooks("commands"):
    add_commands(app, calibration.calibration)
_sort(app, ORDER)
_sort(calibration.calibration, CALIBRATION_ORDER)
app.add_typer(recipes.recipes, name="recipes")
app.add_typer(calibration.calibration, name="calibration")


def for_several_processes() -> list[str]:
    """The commands that work with several processes."""
    added = [name for names in hooks("SEVERAL") for name in names]
    return ["run", "eval", *sorted(added, key=(*ORDER, *added).index)]


def main() -> None:
    """Entry point. Every error is printed as one line, with --json also as an object, and gives an exit code.

    A traceback is printed only with --debug.
    """
    # No progress bars and notes of libraries between our output; their warnings and errors are still shown.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    settle_caches()
    dist = ProcessGroup()
    try:
        settle_streams()
        settle_names()
        _refuse_no_numbers()
        with stoppable(by_launcher=launched() is not None), ordered():
            if ranks := launched():
                several = for_several_processes()
                if sys.argv[1:] and not {sys.argv[1], " ".join(sys.argv[1:3])} & set(several):
                    names = f"{', '.join(several[:-1])} and {several[-1]}"
                    raise InputError("", f"only {names} work with several processes", "start this by itself")
                from quantizers.distributed.torch_group import init_process_group  # imports torch

                dist = init_process_group(*ranks)
            code = app(prog_name="quantize", standalone_mode=False, obj=dist) or 0  # typer.Exit is returned as a code
            if code == 130:  # which typer makes of Ctrl-C
                raise typer.Abort
            sys.stdout.flush()  # here, where it is one line if it fails
            dist.shutdown()
            sys.exit(code)
    except typer.Abort:
        _end(dist, Interrupted("", "interrupted", "give the same command again", signal.SIGINT))
    except QuantizeError as failure:
        if "--debug" in sys.argv:
            traceback.print_exc()
        _end(dist, failure)
    except Exception as failure:
        # typer bundles its own click under a private name, so click's errors are recognised by their method.
        if format_message := getattr(failure, "format_message", None):
            if type(failure).__name__ == "NoArgsIsHelpError":
                print(format_message(), file=sys.stderr)  # the help of a command that was given nothing
                sys.exit(2)
            _end(dist, InputError("", format_message()))
        debug = "--debug" in sys.argv
        if debug:
            traceback.print_exc()
        if isinstance(failure, OSError) and (error := system_error(failure)):
            _end(dist, error, traced=debug)
        problem = f"{type(failure).__name__}: {first_line(failure)}{'' if debug else ' (a traceback with --debug)'}"
        _end(dist, QuantizeError("", problem), traced=debug)


def _refuse_no_numbers() -> None:
    """Refuse what the Hub's library would fail to read as a number when it is imported, without naming it."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        if not (value := os.environ.get(name, "10")).strip().isdigit():
            raise InputError(
                f"{name}={value}", "is no whole number of seconds", "unset it, or set it to one, such as 10"
            )


def _end(dist: ProcessGroup, failure: QuantizeError, *, traced: bool = False) -> NoReturn:
    """Print a line for each mistake, unless it was `traced`, and with --json an object, by rank 0 alone; then end."""
    error, prints = dist.first_failure(failure)
    is_main, process = dist.is_main, launched()
    if process and not dist.is_distributed and process[0]:  # before the processes knew each other: rank 0 says the same
        is_main = prints = False
    if prints and not traced:
        for line in str(error).split("\n"):
            print(f"quantize: {printable(line)}", file=sys.stderr)
    if is_main and "--json" in sys.argv:
        errors = [mistake.as_dict() for mistake in error.errors]
        with contextlib.suppress(QuantizeError):  # where standard output lies on the full disk, too
            print(json.dumps({"error": errors[0]} if len(errors) == 1 else {"errors": errors}, indent=1), flush=True)
    if dist.is_distributed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)  # torch's groups would wait for the processes that were lost
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
