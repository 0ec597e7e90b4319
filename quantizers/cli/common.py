"""What the commands share: common options, printing, asking."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Context, Option

from quantizers.system.errors import InputError
from quantizers.system.files import json_finite
from quantizers.system.formatting import parse_bytes, printable
from quantizers.system.package_data import shipped_names

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantizers.eval.report.schema import AuditFigures


def _shipped(folder: str, begun: str) -> list[str]:
    """For the shell's completion: the shipped files whose names begin so."""
    return [name for name in shipped_names(folder) if name.startswith(begun)]


def size(option: str, help: str) -> Any:
    """An option whose value is a number of bytes, written as 96GiB or 96GB."""
    return Option(metavar="SIZE", parser=lambda text: parse_bytes(text, option), help=help)


def output(help: str, metavar: str | None = None) -> Any:
    """The option for what a command writes."""
    return Option("--output", "-o", metavar=metavar, help=help)


Recipe = Annotated[
    str,
    Argument(
        metavar="RECIPE",
        help="a recipe file, the name of a shipped recipe, or the Hub id of a model that has one",
        autocompletion=lambda incomplete: _shipped("recipes", incomplete),
    ),
]
Source = Annotated[Path | None, Option(metavar="DIR", help="local folder of the source model")]
Facts = Annotated[
    Path | None, Option(metavar="FILE", help="your own architecture spec, such as the facts.yaml of an output")
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="override a key of the recipe, such as experts.group_size=64; null removes it; "
        "may be repeated; paths are relative to the current folder",
    ),
]
Calibration = Annotated[
    str | None,
    Option(
        metavar="SET",
        help="calibration set to use instead of the recipe's: a file, or the name of a shipped set",
        autocompletion=lambda incomplete: _shipped("calibration", incomplete),
    ),
]
Without = Annotated[
    list[str] | None,
    Option(
        metavar="SOURCE",
        help="leave a source of the calibration set out, by its data set's id; samples of the same category take "
        "their place; may be repeated",
    ),
]
TrustRemoteCode = Annotated[
    bool, Option("--trust-remote-code", help="allow custom tokenizer code (model code is never executed)")
]
Device = Annotated[str, Option(help="cpu, cuda, cuda:N, or auto (the first GPU if there is one)")]
DeviceMemory = Annotated[
    int | None, size("--device-memory", "limit the device's memory, e.g. 20GiB (slower; the output is unchanged)")
]
Model = Annotated[str | None, Option(help="without a recipe: a checkpoint's folder or Hub id")]
Data = Annotated[str | None, Option(metavar="SET", help="without a recipe: a calibration set")]
Scratch = Annotated[
    Path | None, Option(metavar="DIR", help="scratch folder for activations; a temporary one by default")
]
Stream = Annotated[bool, Option("--stream", help="leave shards that are on the Hub there, and read what is needed")]
StreamSource = Annotated[
    bool, Option("--stream", help="leave the source on the Hub; fetch its shards when layers need them")
]
PublishAsYouGo = Annotated[
    str | None,
    Option(metavar="OWNER/NAME", help="upload shards as they are finished, to a repository private until the end"),
]
RemoveUploaded = Annotated[
    bool, Option("--remove-uploaded", help="with --publish-as-you-go: remove shards here once they are there")
]
NoPicture = Annotated[bool, Option("--no-picture", help="do not draw a picture")]
Json = Annotated[bool, Option("--json", help="one JSON object on standard output, all else on standard error")]
Debug = Annotated[bool, Option("--debug", help="show a traceback with every error")]

# Of the command alone: printing, asking, and pictures; and what has another name in Python.
COMMAND_ONLY = {"as_json", "debug", "yes", "picture", "no_picture", "folder", "candidate"}


def given(context: Context) -> dict[str, Any]:
    """The options that the user gave, as arguments of the command's function, which has the same names and defaults."""
    return {
        name: value for name, value in context.params.items() if name not in COMMAND_ONLY and value not in (None, ())
    }


def typed() -> tuple[str, ...]:
    """The command as the user typed it, however the program was started."""
    return ("quantize", *sys.argv[1:])


def accounted(audit: AuditFigures) -> str:
    """How many of the source's tensors an audit accounts for, and how."""
    converted = audit.converted_matrices
    return (
        f"{audit.tensors:,} source tensors accounted for, {audit.kept_tensors:,} compared byte for byte"
        f"{f', {converted:,} converted again and compared' if converted else ''}"
    )


def asked(question: str, option: str) -> bool:
    """The user's answer to a question that `option` needs. Raises InputError without a terminal."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise  # Ctrl-C or Ctrl-D
        print(file=sys.stderr)  # the question has no line end
        raise InputError(f"{option}: {question} There is no terminal to confirm on; pass --yes") from None


def emit(data: dict[str, Any], as_json: bool, shown: RenderableType, *, passed: bool = True) -> None:
    """Print a result: as JSON, or as the text, or what rich renders, that was made from it.

    Args:
        passed: of no gate that failed; else the command ends with exit code 3.
    """
    if as_json:
        print(json.dumps(json_finite(data), indent=1, sort_keys=True))
    elif isinstance(shown, str):
        print("\n".join(map(printable, shown.split("\n"))))
    else:
        from rich.console import Console

        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(shown)
    if not passed:
        raise typer.Exit(3)
