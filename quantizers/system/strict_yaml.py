"""Strict YAML: every error has a line number, and values are never guessed.

PyYAML keeps the last of two equal keys, reads `1e-4` as text and `no` as False. Here duplicate
keys are errors, numbers and booleans follow YAML 1.2's core schema, and aliases and tags are refused
(recipes do not need them, and nested aliases can expand to gigabytes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from .errors import InputError, first_line

MAX_BYTES = 200_000  # takes seconds at worst; the largest shipped file has 10,000
MAX_DEPTH = 32

Place = tuple[str | int, ...]  # keys and list indices, from the outermost
_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_CORE_SCHEMA: dict[str, tuple[str, Callable[[str], Any]]] = {  # by tag: pattern and value of a plain scalar
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", lambda _: None),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+", int),
    "tag:yaml.org,2002:float": (_FLOAT, lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))),
}


@dataclass
class Refused(Exception):
    """A fault in a YAML text, and its line (0: unknown); the caller adds the file's name."""

    line: int
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}; {self.remedy}"


# libyaml is ten times as fast, and PyYAML may have been built without it: a base that types cannot know.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Resolves plain scalars by the core schema alone."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, Any]] = {}  # in place of those of YAML 1.1


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else, such as `123e45` or `012`."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a repeated value in full each time: `parse` refuses anchors and aliases."""
        return True


for _tag, (_pattern, _) in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), None)


def dump(values: Mapping[str, Any], width: int = 80, *, short_in_one_line: bool = False) -> str:
    """Values as YAML, keys in the given order. `parse` and YAML 1.1 readers both read the same values back.

    Args:
        width: characters after which long text is folded.
        short_in_one_line: write lists and mappings that contain only scalars as `[a, b]` and `{key: a}`.
    """
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None if short_in_one_line else False,
        width=width,
    )


def parse(path: Path, error: type[InputError] = InputError) -> tuple[dict[str, Any], dict[Place, int]]:
    """The mapping in a YAML file, and the line where each key and list item begins. Raises `error` for any fault."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as failure:
        raise error(path, f"cannot be read ({failure.strerror or failure})", "give an existing file") from None
    if len(raw) > MAX_BYTES:
        raise error(path, f"larger than {MAX_BYTES:,} bytes; this is no recipe or set", "give another file")
    lines: dict[Place, int] = {}
    try:
        data = _values(raw.decode("utf-8"), lines)
    except UnicodeDecodeError as failure:
        line = raw[: failure.start].count(b"\n") + 1
        raise error(f"{path}:{line}", "not UTF-8", "save the file as UTF-8") from None
    except Refused as refused:
        where = f"{path}:{refused.line}" if refused.line else str(path)
        raise error(where, refused.problem, refused.remedy) from None
    if not isinstance(data, dict | None):
        raise error(f"{path}:1", "must be a mapping", "write keys with values")
    return data or {}, lines


def parse_value(text: str) -> Any:
    """One value as YAML: a scalar such as `0.9`, or `{key: value}`. Raises Refused."""
    return _values(text, {})


def dotted(place: Iterable[str | int]) -> str:
    """`("sources", 3, "samples")` as `sources[3].samples`."""
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            key = step if step.isprintable() else repr(step)  # an error stays one line even if a key has a line break
            text += f".{key}" if text else key
    return text


def _values(text: str, lines: dict[Place, int]) -> Any:
    """The values of a YAML text; fills `lines`."""
    try:
        _refuse_unsupported(text)
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _build(node, (), lines)
    except yaml.reader.ReaderError as failure:
        line = text.encode()[: failure.position].count(b"\n") + 1
        raise Refused(line, f"not valid YAML: {failure.reason}", "remove this character") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        problem = getattr(failure, "problem", None) or first_line(failure)
        raise Refused(mark.line + 1 if mark else 0, f"not valid YAML: {problem}", "correct it") from None
    except (ValueError, OverflowError) as failure:  # such as an escape of no character, or 5,000 digits
        raise Refused(0, f"not valid YAML: {failure}", "correct it") from None


def _refuse_unsupported(text: str) -> None:
    # Runs before yaml.compose, which recurses into nested values; scanning deep nesting takes quadratic time.
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise Refused(line, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
        if getattr(event, "anchor", None):
            raise Refused(line, "anchors and aliases are not supported", "repeat the value")
        if getattr(event, "tag", None):
            raise Refused(line, "tags (`!name`) are not supported", "write the plain value")


def _build(node: yaml.Node, place: Place, lines: dict[Place, int]) -> Any:
    lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*place, i), lines) for i, item in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            shown = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
            raise Refused(line, f"a key must be text, not {shown}", "put it in quotes")
        if key in result:
            first = lines[(*place, key)]
            raise Refused(line, f"{dotted((*place, key))}: given twice (first in line {first})", "keep one")
        lines[(*place, key)] = line
        result[key] = _build(value_node, (*place, key), lines)
    return result


def _scalar(node: yaml.ScalarNode) -> Any:
    _, convert = _CORE_SCHEMA.get(node.tag, ("", str))
    return convert(node.value)
