"""Strict YAML: every error has a line number, and values are never guessed.

PyYAML keeps the last of two equal keys, reads `1e-4` as text and `no` as False. Here duplicate
keys are errors, numbers and booleans follow YAML 1.2's core schema, and aliases and tags are refused
(recipes do not need them, and nested aliases can expand to gigabytes).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from .errors import InputError

MAX_BYTES = 200_000  # takes PyYAML seconds at worst; the largest shipped file has 10,000
MAX_DEPTH = 32
MAX_DIGITS = 1000

Model = TypeVar("Model", bound=BaseModel)
Place = tuple[str | int, ...]

_CORE_SCHEMA = {
    "tag:yaml.org,2002:null": r"~|null|Null|NULL|",
    "tag:yaml.org,2002:bool": r"true|True|TRUE|false|False|FALSE",
    "tag:yaml.org,2002:int": r"[-+]?[0-9]+",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class Refused(Exception):
    """What is wrong in a YAML file, and in which line; the caller adds the file's name."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, such as `123e45` or `012`."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a repeated value in full each time: `parse` refuses anchors and aliases."""
        return True


for _tag, _pattern in _CORE_SCHEMA.items():
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def dump(values: Mapping[str, Any], width: int = 80, *, short_in_one_line: bool = False, flow: bool = False) -> str:
    """Write values as YAML, keys in the given order. `parse` and YAML 1.1 readers both read the same values back.

    Args:
        values: text, numbers, booleans, None, and lists and mappings of these.
        width: characters after which long text is folded.
        short_in_one_line: write lists and mappings that contain only scalars as `[a, b]` and `{key: a}`.
        flow: write all lists and mappings so, the outermost too.
    """
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True if flow else None if short_in_one_line else False,
        width=width,
    )


def _scalar(node: yaml.ScalarNode) -> Any:
    if node.style is not None:
        return node.value
    for tag, pattern in _CORE_SCHEMA.items():
        if re.fullmatch(pattern, node.value):
            kind = tag.rsplit(":", 1)[1]
            if kind == "null":
                return None
            if kind == "bool":
                return node.value.lower() == "true"
            if kind == "int":
                if len(node.value) > MAX_DIGITS:
                    raise Refused(node.start_mark.line + 1, f"a number of {len(node.value):,} digits; correct it")
                return int(node.value)
            return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return node.value


def _build(node: yaml.Node, place: Place, lines: dict[Place, int]) -> Any:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*place, i), lines) for i, item in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            raise Refused(key_line, f"a key must be text, not {shown}; put it in quotes")
        if key in result:
            first = lines[(*place, key)]
            raise Refused(key_line, f"{dotted((*place, key))}: given twice (first in line {first}); keep one")
        lines[(*place, key)] = key_line
        result[key] = _build(value_node, (*place, key), lines)
    return result


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


def parse(path: Path, error: type[InputError] = InputError) -> tuple[dict[str, Any], dict[Place, int]]:
    """Read a YAML mapping.

    Args:
        path: the file.
        error: the class to raise for any fault in the file.

    Returns:
        The mapping, and for the place of every key and list item the line where it begins.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as failure:
        raise error(f"{path}: cannot be read ({failure.strerror or failure}); give an existing file") from None
    if len(raw) > MAX_BYTES:
        raise error(f"{path}: larger than {MAX_BYTES:,} bytes; this is no recipe or set; give another file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as failure:
        line = raw[: failure.start].count(b"\n") + 1
        raise error(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None
    lines: dict[Place, int] = {}
    try:
        _refuse_unwanted(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = None if node is None else _build(node, (), lines)
    except Refused as refused:
        raise error(f"{path}:{refused.line}: {refused}") from None
    except yaml.reader.ReaderError as failure:
        line = text[: failure.position].count("\n") + 1
        raise error(f"{path}:{line}: not valid YAML: {failure.reason}; remove this character") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(failure, "problem", None) or str(failure).splitlines()[0]
        raise error(f"{where}: not valid YAML: {problem}; correct it") from None
    except (ValueError, OverflowError) as failure:  # an escape such as "\\UFFFFFFFF", which PyYAML passes to chr
        raise error(f"{path}: not valid YAML: {failure}; correct it") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise error(f"{path}:1: must be a mapping; write keys with values")
    return data, lines


_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


def _refuse_unwanted(text: str) -> None:
    # Runs before yaml.compose, which recurses into nested values; scanning deep nesting takes quadratic time.
    depth = 0
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        line = token.start_mark.line + 1
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MAX_DEPTH:
            raise Refused(line, f"nested deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(token, (yaml.AnchorToken, yaml.AliasToken)):
            raise Refused(line, "anchors and aliases are not supported; repeat the value")
        if isinstance(token, yaml.TagToken):
            raise Refused(line, "tags (`!name`) are not supported; write the plain value")


def load(path: Path, model: type[Model], error: type[InputError] = InputError) -> Model:
    """Read a YAML file into a pydantic model.

    Raises:
        error: one line `file:line: key: what is wrong (remedy)`. Of several faults it shows the first
            by line and the number of others.
    """
    data, lines = parse(path, error)
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        details = [(_place(detail, lines), detail) for detail in failure.errors()]
        # For a union, keep only the deepest faults: not "must be false" next to a fault in `awq.grid`.
        deepest = [
            (place, detail)
            for place, detail in details
            if not any(len(place) < len(other) and other[: len(place)] == place for other, _ in details)
        ]
        faults = sorted((_describe(place, detail, lines, model) for place, detail in deepest), key=lambda f: f[0])
        line, message = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise error(f"{path}:{line}: {message}{more}") from None


def _place(detail: ErrorDetails, lines: dict[Place, int]) -> Place:
    # pydantic adds the name of a union's member to the place; drop parts that are not in the file.
    known: Place = ()
    for part in detail["loc"]:
        if (*known, part) in lines:
            known = (*known, part)
    return (*known, detail["loc"][-1]) if detail["type"] == "missing" else known


def _describe(place: Place, detail: ErrorDetails, lines: dict[Place, int], model: type[BaseModel]) -> tuple[int, str]:
    absent = detail["type"] == "missing"
    line = lines.get(place[:-1] if absent else place, 1)
    name = dotted(place)
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(place[-1]), _all_keys(model), n=1)
        hint = f" (did you mean {close[0]}?)" if close else "; remove it"
        return line, f"{name}: unknown key{hint}"
    if absent:
        return line, f"{name}: missing; add it"
    given = detail.get("input")
    shown = f", not {given!r}" if isinstance(given, (str, int, float, bool, type(None))) else ""
    message = " ".join(detail["msg"].removeprefix("Value error, ").removeprefix("Input ").split())
    if detail["type"] in ("model_type", "dict_type"):
        message = "must be a mapping of keys to values"
    return line, f"{name + ': ' if name else ''}{message}{shown}"


def _all_keys(model: type[BaseModel]) -> list[str]:
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


class Strict(BaseModel):
    """Base of our schemas: frozen, and unknown keys are errors, so that a misspelt option is never ignored.

    The text under a field is its description, in the documentation and in the JSON schema.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
