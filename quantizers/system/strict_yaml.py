"""Strict YAML: every error has a line number, and values are never guessed.

PyYAML keeps the last of two equal keys, reads `1e-4` as text and `no` as False. Here duplicate
keys are errors, numbers and booleans follow YAML 1.2's core schema, and aliases and tags are refused
(recipes do not need them, and nested aliases can expand to gigabytes).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InputError
from .pydantic_errors import Origin, Place, dotted, fault_lines

MAX_BYTES = 200_000  # takes PyYAML seconds at worst; the largest shipped file has 10,000
MAX_DEPTH = 32
MAX_DIGITS = 1000

Model = TypeVar("Model", bound=BaseModel)

_CORE_SCHEMA = {
    "tag:yaml.org,2002:null": r"~|null|Null|NULL|",
    "tag:yaml.org,2002:bool": r"true|True|TRUE|false|False|FALSE",
    "tag:yaml.org,2002:int": r"[-+]?[0-9]+",
    "tag:yaml.org,2002:float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


class Refused(Exception):
    """What is wrong in a YAML text, and in which line (0: unknown); the caller adds the file's name."""

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
    if node.style:
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
        data = _values(text, lines)
    except Refused as refused:
        where = f"{path}:{refused.line}" if refused.line else str(path)
        raise error(f"{where}: {refused}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise error(f"{path}:1: must be a mapping; write keys with values")
    return data, lines


def parse_value(text: str) -> Any:
    """One value as YAML: a scalar such as `0.9`, or `{key: value}`.

    Raises:
        Refused: it is no YAML, or more than is supported here.
    """
    return _values(text, {})


def _values(text: str, lines: dict[Place, int]) -> Any:
    """The values of a YAML text; fills `lines`.

    libyaml reads it ten times as fast where PyYAML has it. What that finds wrong is read again by PyYAML itself, whose
    messages do not depend on the machine.
    """
    try:
        return _values_by(_FAST, text, lines)
    except Refused:
        if _FAST is yaml.SafeLoader:
            raise
        lines.clear()
        return _values_by(yaml.SafeLoader, text, lines)


def _values_by(loader: Any, text: str, lines: dict[Place, int]) -> Any:
    try:
        _refuse_unwanted(text, loader)
        node = yaml.compose(text, Loader=loader)
        return None if node is None else _build(node, (), lines)
    except yaml.reader.ReaderError as failure:
        line = text[: failure.position].count("\n") + 1
        raise Refused(line, f"not valid YAML: {failure.reason}; remove this character") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        problem = getattr(failure, "problem", None) or str(failure).splitlines()[0]
        raise Refused(mark.line + 1 if mark else 0, f"not valid YAML: {problem}; correct it") from None
    except (ValueError, OverflowError) as failure:  # an escape such as "\\UFFFFFFFF", which PyYAML passes to chr
        raise Refused(0, f"not valid YAML: {failure}; correct it") from None


_OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
_CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)


_FAST: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refuse_unwanted(text: str, loader: Any) -> None:
    # Runs before yaml.compose, which recurses into nested values; scanning deep nesting takes quadratic time.
    depth = 0
    for token in yaml.scan(text, Loader=loader):
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
        error: one line `file:line: key: what is wrong (remedy)` for each fault, in the order of the lines.
    """
    data, lines = parse(path, error)
    return fit(data, origins_in(path, lines), Origin(f"{path}:1", 1), model, error)


def origins_in(path: Path, lines: Mapping[Place, int]) -> dict[Place, Origin]:
    """Where each value of a file was given, for messages."""
    return {place: Origin(f"{path}:{line}", line) for place, line in lines.items()}


def fit(
    data: Mapping[str, Any],
    origins: Mapping[Place, Origin],
    whole: Origin,
    model: type[Model],
    error: type[InputError] = InputError,
) -> Model:
    """Values as a pydantic model.

    Args:
        origins: where each value was given.
        whole: where they were given all together.

    Raises:
        error: one line for each fault.
    """
    try:
        return model.model_validate(data)
    except ValidationError as failure:
        raise error("\n".join(fault_lines(failure, origins, whole, model))) from None


class Strict(BaseModel):
    """Base of our schemas: frozen, and unknown keys are errors, so that a misspelt option is never ignored.

    The text under a field is its description, in the documentation and in the JSON schema.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
