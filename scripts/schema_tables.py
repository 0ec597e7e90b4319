"""Schemas in words: Markdown tables of the keys of a recipe, a calibration set, and of what commands write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def key_table(model: type[BaseModel]) -> str:
    """A Markdown table with one row for every key at any depth: its values, its default, and what it does.

    Raises:
        ValueError: a key has no description.
    """
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for name, field in _keys(model, ""):
        if not field.description:
            raise ValueError(f"{name}: has no description; write one under the field")
        cells = (f"`{name}`", values_of(field.annotation, field.metadata), _default(field), one_line(field.description))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def part_tables(models: Sequence[type[BaseModel]]) -> str:
    """Markdown tables for a schema of many parts, one for each model and for each that its fields hold.

    A row has the key, its type, its unit, which is an extra of its JSON schema, and its description.
    """
    lines: list[str] = []
    parts = list(models)
    for model in parts:  # which grows
        lines += [f"### {model.__name__}", "", one_line(model.__doc__ or ""), ""]
        lines += ["| key | type | unit | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            parts += [inner for inner in models_in(field.annotation) if inner not in parts]
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            cells = (f"`{field.alias or name}`", _type(field.annotation), unit, one_line(field.description or ""))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def _type(annotation: Any) -> str:
    """A type in words, with links to the tables of other parts; descriptions say when a value is null."""
    origin, inner = get_origin(annotation), [kind for kind in get_args(annotation) if kind is not NoneType]
    if origin in (Union, UnionType):
        return " or ".join(_type(kind) for kind in inner)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list: {_type(inner[0])}"
    if origin is dict:
        return f"mapping: {_type(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    words: Mapping[Any, str] = {
        bool: "true or false", str: "text", int: "whole number", float: "number", Any: "any value"
    }  # fmt: skip
    return words[annotation]


def one_line(text: str) -> str:
    """The text with every run of white space as one space."""
    return " ".join(text.split())


def _keys(model: type[BaseModel], before: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field, depth first; `sources[]` stands for each item of a list."""
    for name, field in model.model_fields.items():
        yield before + name, field
        listed = "[]" if get_origin(field.annotation) in (tuple, list) else ""
        for inner in models_in(field.annotation):
            yield from _keys(inner, f"{before}{name}{listed}.")


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The schemas that a type names, such as those of a list's items."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def values_of(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a key may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        constraints = [constraint for note in inner[1:] for constraint in getattr(note, "metadata", [note])]
        return values_of(inner[0], constraints)
    if origin in (Union, UnionType):
        return " or ".join(values_of(kind) for kind in inner if kind is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value) if isinstance(value, bool) else value}`" for value in inner)
    if origin in (tuple, list):
        if get_origin(inner[0]) is Literal:
            return f"list of {values_of(inner[0])}"
        return "list of mappings" if any(models_in(annotation)) else "list of names"
    if origin is dict:
        return f"mapping of names to {values_of(inner[1]).replace('number', 'numbers')}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    words: Mapping[Any, str] = {bool: "`true`, `false`", str: "text", int: "whole number", float: "number"}
    return words[annotation] + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = {
        name: getattr(constraint, name)
        for constraint in metadata
        for name in ("ge", "gt", "le")
        if hasattr(constraint, name)
    }
    words = (("ge", "from"), ("gt", "above"), ("le", "to"))
    return "".join(f" {word} {format(bounds[name], ',').removesuffix('.0')}" for name, word in words if name in bounds)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
