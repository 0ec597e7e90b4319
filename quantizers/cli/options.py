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
from quantizers.team.team import Team

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
        help="a recipe's path, the name of a shipped one, or the Hub id of the model that one is shipped for",
        autocompletion=_recipe_names,
    ),
]
SourceOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="where the recipe's source lies on this machine, whatever the recipe calls it"),
]
FactsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="facts of your own about the model's family, as `quantize new --facts` writes"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="a key of the recipe with another value, such as experts.group_size=64; null takes it out; may be "
        "repeated; paths start from the current folder",
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="SET",
        help="another calibration set for the recipe: a file, or the name of a shipped one",
        autocompletion=_set_names,
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="let the tokenizer run code of its own; nothing else of a model ever does"
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON object on standard output, all else on standard error")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: the first GPU where there is one")]
DiskOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="bytes a second that a machine reads from or writes to files; 1GB if not given"),
]
DeviceMemoryOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="use no more of the device than this, e.g. 20GiB; it takes longer then, and gives the same bytes",
    ),
]
NoPictureOption = Annotated[bool, typer.Option("--no-picture", help="draw nothing")]
WorkOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="where hidden states lie meanwhile; a temporary folder by default")
]
DebugOption = Annotated[bool, typer.Option("--debug", help="a traceback with every error")]


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
        InputError: the current folder lies in that checkpoint, where loaders would come across the second one.
    """
    from quantizers.recipe.portable import source_name

    folder = Path(os.path.abspath(recipe)).parent  # of a link, as in the Hub's cache, and not of what it points to
    if recipe.name != RECIPE or not (folder / REPORT).is_file():
        return recipe.stem
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{recipe}: lies in this finished checkpoint; give --output a folder outside of it")
    return f"{Path(source_name(str(folder), folder)).name}-again"


def keep_own_recipe(recipe: Path, output: Path) -> None:
    """Refuse to discard a finished checkpoint for a run of the recipe that lies in it.

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
        InputError: there is nobody to ask.
    """
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        if sys.stdin is not None and sys.stdin.isatty():
            raise  # Ctrl-C or Ctrl-D
        print(file=sys.stderr)  # the question has no line end
        raise InputError(f"{option}: {question} Nobody can be asked without a terminal; add --yes") from None


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
def shared_folder(folder: Path | None, team: Team) -> Iterator[Path]:
    """A temporary folder below `folder`, created by each machine's first process and used by all of them."""
    if team.here.leads:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            yield Path(team.here.tell(inner))
    else:
        yield Path(team.here.tell())
