"""Pydantic schemas of YAML files: their base class, JSON schema, and errors as lines for the file's author."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from .errors import InputError, did_you_mean
from .strict_yaml import Place, Refused, dotted, parse, parse_value

Model = TypeVar("Model", bound=BaseModel)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")


class Strict(BaseModel):
    """Base of our schemas: frozen, and unknown keys are errors, so that a misspelt option is never ignored.

    The text under a field is its description, in the documentation and in the JSON schema. A validator is built when
    it is first used: a command imports more models than it reads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)


class Wrong(ValueError):
    """A value that a validator refuses, with the remedy, which pydantic carries to `fit`."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


class Origin(NamedTuple):
    """Place where a value was given."""

    shown: str  # such as `recipe.yaml:4`, or `--set experts.bits=3`
    line: int  # faults are shown in ascending order of it
    key: str = ""  # the dotted key that `shown` names itself, so that it is not repeated


def load(path: Path, model: type[Model], error: type[InputError] = InputError) -> Model:
    """A YAML file as a pydantic model. Raises `error` as `fit` does."""
    data, lines = parse(path, error)
    return fit(data, origins_in(path, lines), model, error)


def origins_in(path: Path, lines: Mapping[Place, int]) -> dict[Place, Origin]:
    """The origin of each value of a file, and of the whole, for messages."""
    return {place: Origin(f"{path}:{line}", line) for place, line in ({(): 1} | dict(lines)).items()}


def fit(data: Mapping[str, Any], origins: Mapping[Place, Origin], model: type[Model], error: type[InputError]) -> Model:
    """Values as a pydantic model.

    Args:
        origins: of every key and list item that was given, and of the whole.

    Raises:
        error: one error for each fault, whose place is `file:line: key`, in the order of the lines.
    """
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        # Union members' complaints about one value are one fault: "should be a string or must be a mapping".
        by_place: dict[Place, list[ErrorDetails]] = {}
        for detail in failure.errors():
            by_place.setdefault(_place(detail, origins), []).append(detail)
        # Only the deepest: not "must be false" next to a fault in `awq.grid`.
        inner = {place[:length] for place in by_place for length in range(len(place))}
        faults = [_fault(place, by_place[place], origins, model) for place in by_place if place not in inner]
    raise error.several([error(*fault) for _, *fault in sorted(faults, key=lambda fault: fault[0])])


def _place(detail: ErrorDetails, origins: Mapping[Place, Origin]) -> Place:
    # pydantic adds the name of a union's member to the place; drop parts that are not in the file.
    known: Place = ()
    for key in detail["loc"]:
        if (*known, key) in origins:
            known = (*known, key)
    return (*known, detail["loc"][-1]) if detail["type"] == "missing" else known


def _fault(
    place: Place, details: list[ErrorDetails], origins: Mapping[Place, Origin], model: type[BaseModel]
) -> tuple[int, str, str, str]:
    """The line of a fault, and its error's place, problem and remedy."""
    missing = details[0]["type"] == "missing"
    origin = origins[place[:-1] if missing else place]
    name = dotted(place)
    where = f"{origin.shown}: {name}" if name and name != origin.key else origin.shown
    if missing:
        return origin.line, where, "missing", "add it"
    if details[0]["type"] == "extra_forbidden":
        hint = did_you_mean(str(place[-1]), _all_keys(model))
        return origin.line, where, f"unknown key{hint}", "" if hint else "remove it"
    value = details[0].get("input")
    refused = details[0].get("ctx", {}).get("error")
    messages = list(dict.fromkeys(_message(detail) for detail in details))
    problem, remedy = " or ".join(messages), ""
    if isinstance(refused, Wrong) and len(messages) == 1:
        problem, remedy = refused.problem, refused.remedy
    elif len(details) == 1 or details[0]["type"] == "string_type":
        remedy = _as_meant(details[0], origin, name)
    shown = repr(value) if isinstance(value, (str, int, float, bool, type(None))) else ""
    if all(detail["type"] == "value_error" for detail in details) and not problem.startswith(("must ", "should ")):
        if shown and problem.startswith("is not "):
            problem = f"{shown} {problem}"
    elif shown:
        problem += f", not {shown}"
    return origin.line, where, problem, remedy


def _as_meant(detail: ErrorDetails, origin: Origin, name: str) -> str:
    """The remedy for a value that YAML reads as another type than was meant; empty if that cannot be told."""
    value, kind = detail.get("input"), detail["type"]
    if kind == "tuple_type" and isinstance(value, str):
        return f"write it as [{value}]"
    if kind == "string_type" and isinstance(value, int | float):
        given = origin.shown.partition("=")
        return f"write it as {given[0]}='\"{given[2]}\"'" if origin.key == name else "put it in quotes"
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type", "literal_error"):
        expected = detail.get("ctx", {}).get("expected", value).replace(" or ", ", ").split(", ")
        plain = value.capitalize() if value in ("true", "false") else value
        return "write it without quotes" if _is_number(value) and plain in expected else ""
    return ""


def _is_number(text: str) -> bool:
    """Whether YAML reads a text without quotes as a number, true or false."""
    try:
        return isinstance(parse_value(text), int | float)
    except Refused:
        return False


def _message(detail: ErrorDetails) -> str:
    if detail["type"] == "tuple_type":
        return "should be a list"
    if detail["type"] in ("model_type", "dict_type"):
        return "must be a mapping of keys to values"
    return " ".join(re.sub("^(Value error,|Input|String|Tuple) ", "", detail["msg"]).split())


def _all_keys(model: type[BaseModel]) -> list[str]:
    """Every key of the schema at any depth: a wrong key is often the right word at the wrong depth."""
    schema = model.model_json_schema()
    return [
        key for definition in (schema, *schema.get("$defs", {}).values()) for key in definition.get("properties", ())
    ]


def json_schema(model: type[BaseModel] | TypeAdapter[Any], title: str) -> str:
    """The JSON schema of a model, or of a union of models, as text."""
    adapter = model if isinstance(model, TypeAdapter) else TypeAdapter(model)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    schema = head | adapter.json_schema(schema_generator=_Untitled) | {"title": title}
    plain = json.loads(json.dumps(schema), object_hook=_plain_description)
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


class _Untitled(GenerateJsonSchema):
    """Without a title for every key: it would only repeat the key."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _plain_description(schema: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema with its description in one line, links reduced to their text."""
    if isinstance(text := schema.get("description"), str):
        schema["description"] = _LINK.sub(r"\1", " ".join(text.split()))
    return schema
