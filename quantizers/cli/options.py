"""What the commands share: common options, printing, and finding files and folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.system.errors import InputError
from quantizers.system.files import json_finite
from quantizers.system.formatting import printable
from quantizers.system.package_data import shipped_names

GATE_FAILED = 3


def _shipped(folder: str) -> Callable[[str], list[str]]:
    """For the shell's completion: a function from the beginning of a word to the shipped files named so."""

    def names(begun: str) -> list[str]:
        return [name for name in shipped_names(folder) if name.startswith(begun)]

    return names


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="a recipe file, the name of a shipped recipe, or the Hub id of a model that has one",
        autocompletion=_shipped("recipes"),
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="local folder of the source model"),
]
FactsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="your own architecture spec, such as the facts.yaml of an output"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a key of the recipe, such as experts.group_size=64; null removes it; "
        "may be repeated; paths are relative to the current folder",
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="SET",
        help="calibration set to use instead of the recipe's: a file, or the name of a shipped set",
        autocompletion=_shipped("calibration"),
    ),
]
WithoutOption = Annotated[
    list[str] | None,
    typer.Option(
        "--without",
        metavar="SOURCE",
        help="leave a source of the calibration set out, by its data set's id; samples of the same category take "
        "their place; may be repeated",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="allow custom tokenizer code (model code is never executed)"),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON object on standard output, all else on standard error")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto (the first GPU if there is one)")]
DiskOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="disk bandwidth of a machine, in bytes per second; 1GB by default"),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="limit the device's memory, e.g. 20GiB (slower; the output is unchanged)",
    ),
]
NoPictureOption = Annotated[bool, typer.Option("--no-picture", help="do not draw a picture")]
WorkOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="scratch folder for activations; a temporary one by default")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="show a traceback with every error")]


def typed() -> tuple[str, ...]:
    """The command as the user typed it, however the program was started."""
    return ("quantize", *sys.argv[1:])


def asked(question: str, option: str) -> bool:
    """Ask the user; `option` is what needs the answer.

    Raises:
        InputError: there is no terminal.
    """
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise  # Ctrl-C or Ctrl-D
        print(file=sys.stderr)  # the question has no line end
        raise InputError(f"{option}: {question} There is no terminal to confirm on; pass --yes") from None


def emit(data: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a result: as JSON, or as the text made from it."""
    print(
        json.dumps(json_finite(data), indent=1, sort_keys=True)
        if as_json
        else "\n".join(map(printable, text.split("\n")))
    )


def show_rich(data: dict[str, Any], as_json: bool, renderable: Any) -> None:
    """Print a result: as JSON, or as what rich renders."""
    from rich.console import Console

    if as_json:
        emit(data, True, "")
    else:
        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(renderable)
