"""Pydantic's validation errors as lines for a file's author: `r.yaml:4: experts.bits: should be 4 or 8, not 3`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .errors import did_you_mean

Place = tuple[str | int, ...]


class Origin(NamedTuple):
    """Where a value was given.

    Attributes:
        shown: such as `recipe.yaml:4`, or `--set experts.bits=3`.
        line: faults are shown in ascending order of it.
        key: the dotted key that `shown` names itself, so that it is not said twice.
    """

    shown: str
    line: int
    key: str = ""


def dotted(place: Iterable[str | int]) -> str:
    """`("sources", 3, "samples")` as `sources[3].samples`."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            key = part if part.isprintable() else repr(part)  # an error stays one line even if a key has a line break
            text += f".{key}" if text else key
    return text


def fault_lines(
    failure: ValidationError, origins: Mapping[Place, Origin], whole: Origin, model: type[BaseModel]
) -> list[str]:
    """One line for each mistake, in the order of their origins.

    Args:
        origins: of every key and list item that was given.
        whole: of what is in none of them.
        model: the schema, whose keys are suggested for unknown ones.
    """
    details = [(_place(detail, origins), detail) for detail in failure.errors()]
    # For a union, keep only the deepest faults: not "must be false" next to a fault in `awq.grid`.
    deepest = [
        (place, detail)
        for place, detail in details
        if not any(len(place) < len(other) and other[: len(place)] == place for other, _ in details)
    ]
    # What a union's members say of the same value is one mistake: "should be a string or must be a mapping".
    said: dict[Place, list[ErrorDetails]] = {}
    for place, detail in deepest:
        said.setdefault(place, []).append(detail)
    faults = [_describe(place, alike, origins, whole, model) for place, alike in said.items()]
    return [text for _, text in sorted(faults, key=lambda fault: fault[0])]


def _place(detail: ErrorDetails, origins: Mapping[Place, Origin]) -> Place:
    # pydantic adds the name of a union's member to the place; drop parts that are not in the file.
    known: Place = ()
    for part in detail["loc"]:
        if (*known, part) in origins:
            known = (*known, part)
    return (*known, detail["loc"][-1]) if detail["type"] == "missing" else known


def _describe(
    place: Place,
    details: list[ErrorDetails],
    origins: Mapping[Place, Origin],
    whole: Origin,
    model: type[BaseModel],
) -> tuple[int, str]:
    absent = details[0]["type"] == "missing"
    origin = origins.get(place[:-1] if absent else place, whole)
    name = dotted(place)
    start = f"{origin.shown}: {name}: " if name and name != origin.key else f"{origin.shown}: "
    if details[0]["type"] == "extra_forbidden":
        hint = did_you_mean(str(place[-1]), all_keys(model), most=1) or "; remove it"
        return origin.line, f"{start}unknown key{hint}"
    if absent:
        return origin.line, f"{start}missing; add it"
    given = details[0].get("input")
    message = " or ".join(dict.fromkeys(_message(detail) for detail in details))
    shown = isinstance(given, (str, int, float, bool, type(None)))
    if all(detail["type"] == "value_error" for detail in details) and not message.startswith(("must ", "should ")):
        # A sentence of our own, with its remedy: a value after it would be read as a part of the remedy.
        return origin.line, start + (f"{given!r} {message}" if shown and message.startswith("is not ") else message)
    return origin.line, start + message + (f", not {given!r}" if shown else "")


def _message(detail: ErrorDetails) -> str:
    if detail["type"] in ("model_type", "dict_type"):
        return "must be a mapping of keys to values"
    return " ".join(detail["msg"].removeprefix("Value error, ").removeprefix("Input ").split())


def all_keys(model: type[BaseModel]) -> list[str]:
    """Every key of the schema at any depth: a wrong key is often the right word at the wrong depth."""
    keys: list[str] = []
    pending: list[Any] = [model]
    seen: set[type[BaseModel]] = set()
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if kind not in seen:
                seen.add(kind)
                for name, field in kind.model_fields.items():
                    keys.append(field.alias or name)
                    pending.append(field.annotation)
        else:
            pending.extend(getattr(kind, "__args__", ()))
    return keys
