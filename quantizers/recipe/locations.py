"""Where on this machine lies what a recipe names: its source, its sets, and the user's own facts."""

from __future__ import annotations

import os
from pathlib import Path

from quantizers.system.errors import RecipeError
from quantizers.system.shipped import find

from .schema import Recipe, given_at


def source_location(recipe: Recipe, path: Path) -> str:
    """The source's folder if the recipe names an existing one, else the Hub id as written."""
    folder = Path(os.path.expanduser(recipe.source.model))
    if not folder.is_absolute():
        folder = path.parent / folder
    return str(folder.resolve()) if os.path.isdir(folder) else recipe.source.model


def facts_location(recipe: Recipe, path: Path) -> Path | None:
    """The file with the user's own facts that a recipe names, relative to the recipe; None if it names none.

    Raises:
        RecipeError: there is no such file.
    """
    if recipe.source.facts is None:
        return None
    file = path.parent / os.path.expanduser(recipe.source.facts)
    if not file.is_file():
        where = given_at(("source", "facts"), path)
        raise RecipeError(f"{where}: {recipe.source.facts}: no such file; correct the path")
    return file


def set_location(recipe_value: str, path: Path) -> Path:
    """The path of a calibration set that a recipe names: relative to the recipe, or a shipped set."""
    return find(recipe_value, "calibration", beside=path.parent)
