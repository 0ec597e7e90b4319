"""Documentation of a pydantic schema: a table of its keys, and a JSON schema for editors.

Both are made from the same fields, so neither can drift from what is accepted. The text under a field is its
description.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


def key_table(model: type[BaseModel]) -> str:
    """A Markdown table with one row for every key at any depth: its values, its default, and what it does.

    Raises:
        ValueError: a key has no description.
    """
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for name, field in _keys(model, ""):
        if not field.description:
            raise ValueError(f"{name}: has no description; write one under the field")
        cells = (f"`{name}`", _values(field.annotation, field.metadata), _default(field), _plain(field.description))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def part_tables(models: Sequence[type[BaseModel]]) -> str:
    """Markdown tables for a schema of many parts, one for each model and for each that its fields hold.

    A row has the key, its type, its unit, which is an extra of its JSON schema, and its description.
    """
    lines: list[str] = []
    parts = list(models)
    for model in parts:  # which grows
        lines += [f"### {model.__name__}", "", _plain(model.__doc__ or ""), ""]
        lines += ["| key | type | unit | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            parts += [inner for inner in _models(field.annotation) if inner not in parts]
            extra = field.json_schema_extra
            unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
            cells = (f"`{field.alias or name}`", _type(field.annotation), unit, _plain(field.description or ""))
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


def json_schema(model: type[BaseModel] | TypeAdapter[Any], title: str) -> str:
    """The JSON schema of a model, or of a union of models, as text."""
    make = model.json_schema if isinstance(model, TypeAdapter) else model.model_json_schema
    schema = make(schema_generator=_Untitled)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return json.dumps(head | _in_words(schema | {"title": title}), indent=1, ensure_ascii=False) + "\n"


class _Untitled(GenerateJsonSchema):
    """Without a title for every key: it would only repeat the key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _in_words(schema: Any) -> Any:
    """The schema with descriptions in one line, and with the text of their links alone."""
    if isinstance(schema, list):
        return [_in_words(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _LINK.sub(r"\1", _plain(value)) if key == "description" and isinstance(value, str) else _in_words(value)
        for key, value in schema.items()
    }


def _plain(text: str) -> str:
    return " ".join(text.split())


def _keys(model: type[BaseModel], before: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every key with its field, depth first; `sources[]` stands for each item of a list."""
    for name, field in model.model_fields.items():
        yield before + name, field
        listed = "[]" if get_origin(field.annotation) in (tuple, list) else ""
        for inner in _models(field.annotation):
            yield from _keys(inner, f"{before}{name}{listed}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a key may be, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(inner[0], [part for item in inner[1:] for part in getattr(item, "metadata", [item])])
    if origin in (Union, UnionType):
        return " or ".join(_values(kind) for kind in inner if kind is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value) if isinstance(value, bool) else value}`" for value in inner)
    if origin in (tuple, list):
        return "list of mappings" if any(_models(annotation)) else "list of names"
    if origin is dict:
        return f"mapping of names to {_values(inner[1]).replace('number', 'numbers')}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    words: Mapping[Any, str] = {bool: "`true`, `false`", str: "text", int: "whole number", float: "number"}
    return words[annotation] + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    bounds = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le") if hasattr(item, name)}
    words = (("ge", "from"), ("gt", "above"), ("le", "to"))
    return "".join(f" {word} {bounds[name]:g}" for name, word in words if name in bounds)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, BaseModel):
        return ""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"
