"""What the commands share: common options, printing, and finding files and folders."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.system.errors import InputError
from quantizers.system.files import json_finite
from quantizers.system.output_files import RECIPE, REPORT

GATE_FAILED = 3


def _recipe_names(begun: str) -> list[str]:
    """Shipped recipes whose names start with `begun`, for the shell's completion."""
    from quantizers.system.package_data import shipped_names

    return [name for name in shipped_names("recipes") if name.startswith(begun)]


def _set_names(begun: str) -> list[str]:
    """Shipped calibration sets whose names start with `begun`, for the shell's completion."""
    from quantizers.system.package_data import shipped_names

    return [name for name in shipped_names("calibration") if name.startswith(begun)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="a recipe file, the name of a shipped recipe, or the Hub id of a model that has one",
        autocompletion=_recipe_names,
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="local folder of the source model"),
]
FactsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="your own architecture spec, as `quantize new --facts` writes it"),
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
        autocompletion=_set_names,
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


def default_output(name: str, say: bool = True) -> Path:
    """Where a command writes without --output: out/`name` below the current folder.

    Args:
        say: print it on standard error; only one of several processes should.
    """
    output = Path("out") / name
    if say:
        print(f"output: {output} (another with --output)", file=sys.stderr, flush=True)
    return output


def run_name(recipe: Path) -> str:
    """What a run without --output is called: as its recipe.

    The recipe of a finished checkpoint is always called recipe.yaml, so its run is called after the checkpoint's
    folder: NAME-again.

    Raises:
        InputError: the current folder is inside that checkpoint, where loaders would find the second one.
    """
    from quantizers.recipe.portable import source_name

    folder = Path(os.path.abspath(recipe)).parent  # of a link, as in the Hub's cache, and not of what it points to
    if recipe.name != RECIPE or not (folder / REPORT).is_file():
        return recipe.stem
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{recipe}: the current folder is inside this finished checkpoint; give --output a folder outside of it"
        )
    return f"{Path(source_name(str(folder), folder)).name}-again"


def keep_own_recipe(recipe: Path, output: Path) -> None:
    """Refuse to discard a finished checkpoint for a run of its own recipe.

    Raises:
        InputError: the recipe is one of the files that would be discarded.
    """
    if Path(os.path.abspath(recipe)).parent.resolve() == output.resolve():
        raise InputError(f"{recipe}: --fresh would discard it with the rest of {output}; give --output another folder")


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


def refuse_unfinished_runs(names: Iterable[str | Path]) -> None:
    """Refuse checkpoints that are the folder of an unfinished run; a Hub id is none.

    Raises:
        OutputError: one of them is; the message has the command that finishes it.
    """
    from quantizers.output.journal import refuse_unfinished

    for name in names:
        refuse_unfinished(Path(name))


def emit(data: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a result: as JSON, or as the text made from it."""
    print(json.dumps(json_finite(data), indent=1, sort_keys=True) if as_json else text)


def show_rich(data: dict[str, Any], as_json: bool, renderable: Any) -> None:
    """Print a result: as JSON, or as what rich renders."""
    from rich.console import Console

    if as_json:
        emit(data, True, "")
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(renderable)


def find_set(name: str, such_as: str) -> Path:
    """A calibration set by its path, or by the name of a shipped one.

    Args:
        such_as: a shipped set, named in the error message as an example.

    Raises:
        InputError: there is no such set.
    """
    from quantizers.system.errors import did_you_mean
    from quantizers.system.package_data import find, shipped_names

    path = find(name, "calibration")
    if not path.is_file():
        hint = did_you_mean(name, shipped_names("calibration"))
        raise InputError(f"{name}: no such set{hint}; give a file, or the name of a shipped set such as {such_as}")
    return path


@contextlib.contextmanager
def temporary_folder(folder: Path | None) -> Iterator[Path]:
    """A temporary folder below `folder`, which is created if it does not exist."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        yield Path(inner)
