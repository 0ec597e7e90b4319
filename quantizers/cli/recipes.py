"""`quantize recipes` and `quantize new`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import DebugOption, JsonOption, emit

recipes = typer.Typer(rich_markup_mode=None)
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="as `quantize recipes` lists it")]


@recipes.callback(invoke_without_command=True)
def recipes_(context: typer.Context, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List, show and copy the shipped recipes; without a word it lists them.

    Example: quantize recipes
    """
    if context.invoked_subcommand is None:
        _list(as_json)


def _list(as_json: bool) -> None:
    from quantizers.recipe.catalogue import rows
    from quantizers.system.text_table import plain

    listed = rows()
    header = ("name", "source", "calibration", "experts")
    emit({"recipes": listed}, as_json, plain(header, [[row[key] for key in header] for row in listed]))


@recipes.command(name="list")
def list_recipes(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """List the shipped recipes.

    Example: quantize recipes list --json
    """
    _list(as_json)


@recipes.command()
def show(name: NameArgument, as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Print a recipe.

    Example: quantize recipes show tiny-minimax-m2-fp8-int4
    """
    from quantizers.recipe.catalogue import text_of

    text = text_of(name)
    emit({"name": name, "text": text}, as_json, text.rstrip("\n"))


@recipes.command()
def copy(
    name: NameArgument,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="NAME.yaml here by default")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy a recipe to change it; its paths are adapted so that it works where it then lies.

    Example: quantize recipes copy tiny-minimax-m2-fp8-int4 mine.yaml
    """
    from quantizers.recipe.catalogue import copied, write_new

    path = file or Path(f"{name.removesuffix('.yaml')}.yaml")
    write_new(copied(name), path)
    emit({"recipe": str(path)}, as_json, f"wrote {path}; next: quantize plan {path}")


def new(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a model on the Hub that is known here, or a folder")],
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="after the model's name by default")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Write a commented recipe for a model.

    Example: quantize new MiniMaxAI/MiniMax-M2.1 mine.yaml
    """
    from quantizers.recipe.catalogue import new_recipe, write_new

    path = file or Path(f"{Path(model).name.lower()}-fp8-int4.yaml")
    write_new(new_recipe(model), path)
    emit({"recipe": str(path)}, as_json, f"wrote {path}; next: quantize plan {path}")
