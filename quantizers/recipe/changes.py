"""Recipe keys overridden on the command line: `--set key=value` and `--calibration SET`.

They change the recipe before it is checked, so the changed recipe is hashed and written to the output. A value is YAML;
`null` removes a key. Paths are relative to the current folder, those in the file to the file's.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.errors import RecipeError, did_you_mean
from quantizers.system.package_data import find, shipped_names
from quantizers.system.schema import Origin
from quantizers.system.strict_yaml import Place, Refused, dotted, parse_value

CALIBRATION = ("calibration",)
SET = ("calibration", "set")
WITHOUT = ("calibration", "without")
SETS = (CALIBRATION, SET, ("verify", "perplexity", "data"))
MODEL = ("source", "model")
FACTS = ("source", "facts")


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


def changes_of(
    settings: Mapping[str, Any] | Sequence[str] = (),
    calibration: str | Path | None = None,
    without: Sequence[str] = (),
) -> tuple[Change, ...]:
    """Read `--set` (texts such as `experts.group_size=64`, or a mapping), `--calibration` and `--without`.

    Raises RecipeError: a text is not `key=value`, its value is no YAML, a path leads nowhere, or a key is given twice.
    """
    if isinstance(settings, Mapping):
        settings = [f"{key}={json.dumps(value, default=str)}" for key, value in settings.items()]  # JSON is YAML
    changes = [_change(text) for text in settings]
    if calibration is not None:
        shown = f"--calibration {calibration}"
        if whole := next((change for change in changes if change.place == CALIBRATION), None):
            raise RecipeError(f"{shown}: {whole.shown} names a set too; give one of them")
        changes.append(Change(SET, _from_here(SET, calibration, shown), shown))
    if without:
        changes.append(Change(WITHOUT, list(without), f"--without {' --without '.join(without)}"))
    given: dict[tuple[str, ...], Change] = {}
    for change in changes:
        if change.place in given:
            raise RecipeError(f"{change.shown}: {given[change.place].shown} gives this key too; give one of them")
        given[change.place] = change
    return tuple(changes)


def _change(text: str) -> Change:
    shown = f"--set {text if text.isprintable() else repr(text)}"
    key, equals, value = text.partition("=")
    parts = tuple(key.strip().split("."))
    if not equals or not all(parts):
        raise RecipeError(f"{shown}: is not key=value; write it as --set experts.group_size=64")
    if not value.strip():
        raise RecipeError(f"{shown}: has no value; give one, or null to take the key out of the recipe")
    try:
        return Change(parts, _from_here(parts, parse_value(value), shown), shown)
    except Refused as refused:
        raise RecipeError(f"{shown}: {refused}") from None


def _from_here(place: Place, value: Any, shown: str) -> Any:
    """A value in which paths that start from the current folder are absolute; RecipeError if one leads nowhere."""
    if isinstance(value, dict):
        return {key: _from_here((*place, key), inner, shown) for key, inner in value.items()}
    if not isinstance(value, str):
        return value
    if place in SETS:
        path = find(value, "calibration")
        if not os.path.isfile(path):
            hint = did_you_mean(value, shipped_names("calibration"))
            raise RecipeError(f"{shown}: no such set{hint}; give a file, or the name of a shipped set such as embedded")
        return str(path.absolute())
    if place in (MODEL, FACTS):
        path = Path(os.path.expanduser(value))
        if os.path.exists(path):
            return str(path.absolute())
        is_id = place == MODEL and value.count("/") == 1 and not value.startswith((".", "/", "~"))
        if not is_id:
            what = "folder; give one that is there, or a Hub id" if place == MODEL else "file; give one that is there"
            raise RecipeError(f"{shown}: no such {what}")
    return value


def changed(
    data: Mapping[str, Any], origins: Mapping[Place, Origin], changes: Sequence[Change]
) -> tuple[dict[str, Any], dict[Place, Origin]]:
    """A recipe's values with the changes made, in their order, and where each value comes from.

    Raises RecipeError if a key to remove does not exist, or the value above a key is no mapping.
    """
    result, new_origins = copy.deepcopy(dict(data)), dict(origins)
    for change in changes:
        inside = change.place[:1] == CALIBRATION and len(change.place) > 1
        if inside and isinstance(result.get("calibration"), str):
            result["calibration"] = {"set": result["calibration"]}  # which means the same as the name alone
            new_origins[SET] = new_origins[CALIBRATION]
        if change.value is None:
            _remove(change, result, new_origins)
        else:
            _set(change, result, new_origins)
    return result, new_origins


def _remove(change: Change, data: dict[str, Any], origins: dict[Place, Origin]) -> None:
    inner: Any = data
    for part in change.place[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or change.place[-1] not in inner:
        raise RecipeError(f"{change.shown}: the recipe has no such key; leave it out")
    del inner[change.place[-1]]
    _forget(change.place, origins)


def _set(change: Change, data: dict[str, Any], origins: dict[Place, Origin]) -> None:
    inner, place = data, change.place
    for depth, part in enumerate(place[:-1], 1):
        if inner.get(part) is None:
            inner[part] = {}
            origins[place[:depth]] = change.origin
        if not isinstance(inner[part], dict):
            raise RecipeError(
                f"{change.shown}: the recipe has `{part}: {json.dumps(inner[part])}`, which holds no keys; give all "
                f"of them as --set {dotted(place[:depth])}='{{...}}'"
            )
        inner = inner[part]
    _forget(place, origins)
    inner[place[-1]] = change.value
    origins.update(dict.fromkeys(_places(change.value, place), change.origin))


def _forget(place: Place, origins: dict[Place, Origin]) -> None:
    for old in [old for old in origins if old[: len(place)] == place]:
        del origins[old]


def _places(value: Any, place: Place) -> list[Place]:
    """The place of a value, and of everything in it."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for key, one in inner for deeper in _places(one, (*place, key)))]
