"""Reads a recipe, and locates what it names: a shipped recipe, its source, its sets, the user's own facts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantizers.architectures.families import published_models
from quantizers.system.errors import InputError, RecipeError, did_you_mean
from quantizers.system.package_data import find, shipped, shipped_names
from quantizers.system.schema import Origin, fit, origins_in
from quantizers.system.strict_yaml import Place, dotted, parse

from .changes import Change, changed
from .schema import Recipe


def read_recipe(name: str, changes: Sequence[Change] = ()) -> tuple[Recipe, Path]:
    """Read and check a recipe, whose name is as for `find_recipe`, with changed settings.

    Returns:
        The recipe and its path; relative paths in the recipe start from that path's folder.

    Raises:
        RecipeError: the recipe is wrong; a line for each fault, naming file, line and key.
    """
    path = find_recipe(name)
    data, origins = _values(path, changes)
    return fit(data, origins, Recipe, RecipeError), path


def _values(path: Path, changes: Sequence[Change]) -> tuple[dict[str, Any], dict[Place, Origin]]:
    data, lines = parse(path, RecipeError)
    return changed(data, origins_in(path, lines), changes)


def given_at(place: Place, path: Path, changes: Sequence[Change] = ()) -> str:
    """Where a key's value comes from, for messages: `recipe.yaml:7: experts.budget`, or the option that gave it."""
    origin = _values(path, changes)[1].get(place, Origin(f"{path}:1", 1))
    return origin.shown if origin.key == dotted(place) else f"{origin.shown}: {dotted(place)}"


def find_set(name: str, such_as: str = "embedded") -> Path:
    """The file of a calibration set, from a path or the name of a shipped one.

    Raises InputError, which names the shipped set `such_as` as an example, if there is no such set.
    """
    path = find(name, "calibration")
    if not path.is_file():
        hint = did_you_mean(name, shipped_names("calibration"))
        raise InputError(f"{name}: no such set{hint}; give a file, or the name of a shipped set such as {such_as}")
    return path


def find_recipe(name: str) -> Path:
    """The file of a recipe, from a path, the bare name of a shipped one, or a model's Hub id.

    Raises RecipeError if there is no such file, or several recipes are shipped for the model.
    """
    path = find(name, "recipes")
    if os.path.isfile(path):
        return path
    if os.path.isdir(path) and (path / "config.json").is_file():
        raise RecipeError(f"{name}: is a model's folder, no recipe; `quantize new {name}` writes a recipe for it")
    return shipped_recipe(name)


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe, from its name or a model's Hub id. Raises RecipeError as `find_recipe`."""
    files = {recipe: shipped("recipes") / f"{recipe}.yaml" for recipe in shipped_names("recipes")}
    if name.removesuffix(".yaml") in files:
        return files[name.removesuffix(".yaml")]
    models = {recipe: parse(file)[0]["source"]["model"] for recipe, file in files.items()}
    made = [recipe for recipe, model in models.items() if model.lower() == name.lower()]
    if len(made) == 1:
        return files[made[0]]
    if made:
        raise RecipeError(f"{name}: {len(made)} recipes are shipped for this model; name one: {', '.join(made)}")
    if "/" in name and name in published_models():
        raise RecipeError(f"{name}: no recipe is shipped for this model; `quantize new {name}` writes one")
    on_the_hub = {model for model in models.values() if not model.startswith(".")}
    hint = did_you_mean(name.removesuffix(".yaml"), [*models, *sorted(on_the_hub)])
    raise RecipeError(f"{name}: no such recipe{hint}; give a file, or a name that `quantize recipes` lists")


def source_location(recipe: Recipe, path: Path) -> str:
    """The source's folder if the recipe names an existing one, else the Hub id as written."""
    folder = path.parent / os.path.expanduser(recipe.source.model)
    return str(folder.resolve()) if os.path.isdir(folder) else recipe.source.model


def facts_location(recipe: Recipe, path: Path) -> Path | None:
    """The file with the user's own facts that a recipe names, relative to the recipe; None if it names none.

    Raises RecipeError if there is no such file.
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
