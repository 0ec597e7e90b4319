"""Reads a recipe with the keys that the command line overrides, and locates the files that it names.

Changes (`--set`, `--calibration`, `--without`) are made before the recipe is checked, so that the changed one is hashed
and written to the output. Their paths are relative to the current folder, those in the file to the file's.
"""

from __future__ import annotations

import copy
import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from quantizers.architectures.families import published_models
from quantizers.system.errors import RecipeError, did_you_mean
from quantizers.system.schema import Origin, fit, origins_in
from quantizers.system.shipped import find, shipped, shipped_names
from quantizers.system.strict_yaml import Place, Refused, dotted, parse, parse_value

from .schema import Recipe

CALIBRATION = ("calibration",)
SET = ("calibration", "set")
WITHOUT = ("calibration", "without")
SETS = (CALIBRATION, SET, ("verify", "perplexity", "data"))
MODEL = ("source", "model")
FACTS = ("source", "facts")
BY_BUDGET = (("experts", "budget"), ("experts", "bits_per_weight"), ("experts", "tensor_parallel"))


@dataclass(frozen=True)
class Change:
    """One key of a recipe with another value."""

    place: tuple[str, ...]
    value: Any  # None takes the key out
    shown: str  # the option that gave it, for messages

    @property
    def origin(self) -> Origin:
        """For faults of the value; they come before those of the file."""
        return Origin(self.shown, 0, dotted(self.place))


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
    """Origin of a key's value, for messages: `recipe.yaml:7: experts.budget`, or the option that gave it."""
    origin = _values(path, changes)[1].get(place, Origin(f"{path}:1", 1))
    return origin.shown if origin.key == dotted(place) else f"{origin.shown}: {dotted(place)}"


def fixed_bits(path: Path, changes: Sequence[Change]) -> str:
    """The options that give the recipe at `path`, with `changes` that were given, 4 bits in place of a budget."""
    whole = _values(path, changes)[0]
    given = [place for place in BY_BUDGET if _value_at(place, whole) is not None]
    stay = [change for change in changes if change.place not in given]
    in_file = _values(path, stay)[0]
    options = [f"--set {dotted(place)}=null" for place in given if _value_at(place, in_file) is not None]
    left_out = [change.shown for change in changes if change not in stay]
    also = f", and leave out {' and '.join(left_out)}" if left_out else ""
    return f"{' '.join([*options, '--set experts.bits=4'])}{also}"


def _value_at(place: Place, data: Any) -> Any:
    """The value at a place; None if there is none."""
    for key in place:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def set_file(name: str, path: Path) -> Path:
    """The file of a set that the recipe at `path` names; RecipeError with line and key if there is none."""
    file = set_location(name, path)
    if not file.is_file():
        data = _values(path, ())[0]
        where = next((given_at(place, path) for place in SETS if _value_at(place, data) == name), str(path))
        hint = did_you_mean(name, shipped_names("calibration"))
        raise RecipeError(f"{where}: {name}", f"no such set{hint}", "correct the path")
    return file


def find_set(name: str, such_as: str = "embedded", shown: str = "") -> Path:
    """The file of a calibration set, from a path or the name of a shipped one.

    Raises RecipeError, which names the option `shown` and the shipped set `such_as` as an example, if there is none.
    """
    path = find(name, "calibration")
    if not os.path.isfile(path):
        hint = did_you_mean(name, shipped_names("calibration"))
        give = f"give a file, or the name of a shipped set such as {such_as}"
        raise RecipeError(shown or name, f"no such set{hint}", give)
    return path


def find_recipe(name: str) -> Path:
    """The file of a recipe, from a path, the bare name of a shipped one, or a model's Hub id.

    Raises RecipeError if there is no such file, or several recipes are shipped for the model.
    """
    path = find(name, "recipes")
    if os.path.isfile(path):
        return path
    if os.path.isdir(path) and (path / "config.json").is_file():
        raise RecipeError(name, "is a model's folder, no recipe", f"`quantize new {name}` writes a recipe for it")
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
        raise RecipeError(name, f"{len(made)} recipes are shipped for this model", f"name one: {', '.join(made)}")
    if "/" in name and name in published_models():
        raise RecipeError(name, "no recipe is shipped for this model", f"`quantize new {name}` writes one")
    on_the_hub = {model for model in models.values() if not model.startswith(".")}
    hint = did_you_mean(name.removesuffix(".yaml"), [*models, *sorted(on_the_hub)])
    if os.path.isfile(os.path.expanduser(f"{name}.yaml")):
        hint = f" (did you mean {name}.yaml?)"
    is_model = name.count("/") == 1 and not hint and not name.startswith((".", "/", "~")) and not name.endswith(".yaml")
    new = f", or write one for this model: `quantize new {name}`" if is_model else ""
    raise RecipeError(name, f"no such recipe{hint}", f"give a file, or a name that `quantize recipes` lists{new}")


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
        raise RecipeError(f"{where}: {recipe.source.facts}", "no such file", "correct the path")
    return file


def set_location(recipe_value: str, path: Path) -> Path:
    """The path of a calibration set that a recipe names: relative to the recipe, or a shipped set."""
    return find(recipe_value, "calibration", beside=path.parent)


def changes_of(
    settings: Mapping[str, Any] | Sequence[str] = (),
    calibration: str | Path | None = None,
    without: Sequence[str] = (),
) -> tuple[Change, ...]:
    """Read `--set` (texts such as `experts.group_size=64`, or a mapping), `--calibration` and `--without`.

    Raises RecipeError: a text is not `key=value`, its value is no YAML, a path leads nowhere, or a key is given twice.
    """
    if isinstance(settings, Mapping):
        settings = [f"{key}={_as_yaml(key, value)}" for key, value in settings.items()]
    changes = [_change(text) for text in settings]
    if calibration is not None:
        shown = f"--calibration {calibration}"
        if whole := next((change for change in changes if change.place == CALIBRATION), None):
            raise RecipeError(shown, f"{whole.shown} names a set too", "give one of them")
        changes.append(Change(SET, _from_here(SET, calibration, shown), shown))
    if without:
        changes.append(Change(WITHOUT, list(without), f"--without {' --without '.join(without)}"))
    given: dict[tuple[str, ...], Change] = {}
    for change in changes:
        if change.place in given:
            raise RecipeError(change.shown, f"{given[change.place].shown} gives this key too", "give one of them")
        given[change.place] = change
    return tuple(changes)


def _as_yaml(key: str, value: Any) -> str:
    """A value from Python as JSON, which is YAML; RecipeError if it is none that a recipe can have."""

    def plain(member: Any) -> Any:
        if isinstance(member, os.PathLike):
            return os.fspath(member)
        if getattr(member, "ndim", None) == 0 and hasattr(member, "item"):  # a number of numpy or torch
            return member.item()
        raise TypeError

    try:
        return json.dumps(value, default=plain)
    except (TypeError, ValueError):
        fault = f"{reprlib.repr(value)} is no value of a recipe"
        raise RecipeError(
            f"settings: {key}", fault, "give text, a number, True, False, None, a list or a mapping"
        ) from None


def _change(text: str) -> Change:
    shown = f"--set {text if text.isprintable() else repr(text)}"
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts):
        raise RecipeError(shown, "is not key=value", "write it as --set experts.group_size=64")
    if not value.strip():
        raise RecipeError(shown, "has no value", "give one, or null to take the key out of the recipe")
    try:
        return Change(parts, _from_here(parts, parse_value(value), shown), shown)
    except Refused as refused:
        raise RecipeError(shown, refused.problem, refused.remedy) from None


def _from_here(place: Place, value: Any, shown: str) -> Any:
    """A value in which paths that start from the current folder are absolute; RecipeError if one leads nowhere."""
    if isinstance(value, dict):
        return {key: _from_here((*place, key), inner, shown) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if place in SETS:
        return str(find_set(value, shown=shown).absolute())
    if place in (MODEL, FACTS):
        path = Path(os.path.expanduser(value))
        if os.path.exists(path):
            return str(path.absolute())
        is_id = place == MODEL and value.count("/") == 1 and not value.startswith((".", "/", "~"))
        if not is_id:
            if place == MODEL:
                raise RecipeError(shown, "no such folder", "give one that is there, or a Hub id")
            raise RecipeError(shown, "no such file", "give one that is there")
    return value


def changed(
    data: Mapping[str, Any], origins: Mapping[Place, Origin], changes: Sequence[Change]
) -> tuple[dict[str, Any], dict[Place, Origin]]:
    """A recipe's values with the changes made, in their order, and where each value comes from.

    Raises RecipeError if a key to remove does not exist, or the value above a key is no mapping.
    """
    result, new_origins = copy.deepcopy(dict(data)), dict(origins)
    for change in changes:
        place, key = change.place, change.place[-1]
        if place[:1] == CALIBRATION and len(place) > 1 and isinstance(result.get("calibration"), str):
            result["calibration"] = {"set": result["calibration"]}  # which means the same as the name alone
            new_origins[SET] = new_origins[CALIBRATION]
        if change.value is None:
            inner = _value_at(place[:-1], result)
            if not isinstance(inner, dict) or key not in inner:
                raise RecipeError(change.shown, "the recipe has no such key", "leave it out")
            del inner[key]
        else:
            inner = result
            for depth, above in enumerate(place[:-1], 1):
                if inner.get(above) is None:
                    inner[above] = {}
                    new_origins[place[:depth]] = change.origin
                if not isinstance(inner[above], dict):
                    raise RecipeError(
                        change.shown,
                        f"the recipe has `{above}: {json.dumps(inner[above])}`, which holds no keys",
                        _all_at_once(place[:depth], changes),
                    )
                inner = inner[above]
            inner[key] = change.value
        new_origins = {old: origin for old, origin in new_origins.items() if old[: len(place)] != place}
        if change.value is not None:
            new_origins |= dict.fromkeys(_places(change.value, place), change.origin)
    return result, new_origins


def _all_at_once(place: Place, changes: Sequence[Change]) -> str:
    """The option that gives all changed keys below a place, and those in whose place it stands."""
    below = [change for change in changes if change.place[: len(place)] == place and len(change.place) > len(place)]
    keys: dict[str, Any] = {}
    for change in below:
        inner = keys
        *above, last = change.place[len(place) :]
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = change.value
    instead = [change.shown for change in changes if change in below or change.place == place]
    return f"give --set {dotted(place)}={quote(json.dumps(keys))} instead of {' and '.join(instead)}"


def _places(value: Any, place: Place) -> list[Place]:
    """The place of a value, and of everything in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for key, member in inner for deeper in _places(member, (*place, key)))]
