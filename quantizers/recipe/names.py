"""What a recipe is called: a file, the name of a shipped one, or the Hub id of the model that one is shipped for."""

from __future__ import annotations

import os
from pathlib import Path

from quantizers.architectures.families import published_models
from quantizers.system.errors import RecipeError
from quantizers.system.near_names import did_you_mean
from quantizers.system.shipped import find, shipped, shipped_names
from quantizers.system.strict_yaml import parse


def find_recipe(name: str) -> Path:
    """The file of a recipe, from a path, the bare name of a shipped one, or a model's Hub id.

    Raises:
        RecipeError: there is no such file; or several recipes are shipped for the model.
    """
    path = find(name, "recipes")
    if os.path.isfile(path):
        return path
    if os.path.isdir(path) and (path / "config.json").is_file():
        raise RecipeError(f"{name}: is a model's folder, no recipe; `quantize new {name}` writes a recipe for it")
    return _shipped_for(name) or _refuse(name)


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe, from its name or a model's Hub id.

    Raises:
        RecipeError: as `find_recipe`.
    """
    path = shipped("recipes") / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name == name and os.path.isfile(path):
        return path
    return _shipped_for(name) or _refuse(name)


def _models() -> dict[str, str]:
    """The model of each shipped recipe, by the recipe's name."""
    return {name: parse(shipped("recipes") / f"{name}.yaml")[0]["source"]["model"] for name in shipped_names("recipes")}


def _shipped_for(model: str) -> Path | None:
    """The recipe that is shipped for a model on the Hub; None if there is none.

    Raises:
        RecipeError: there are several.
    """
    made = [name for name, source in _models().items() if source.lower() == model.lower()]
    if len(made) > 1:
        raise RecipeError(f"{model}: {len(made)} recipes are shipped for this model; name one: {', '.join(made)}")
    return shipped("recipes") / f"{made[0]}.yaml" if made else None


def _refuse(name: str) -> Path:
    """Raise RecipeError with what may have been meant."""
    if name in published_models():
        raise RecipeError(f"{name}: no recipe is shipped for this model; `quantize new {name}` writes one")
    models = _models()
    on_the_hub = {source for source in models.values() if not source.startswith(".")}
    hint = did_you_mean(name.removesuffix(".yaml"), [*models, *sorted(on_the_hub)])
    raise RecipeError(f"{name}: no such recipe{hint}; give a file, or a name that `quantize recipes` lists")
