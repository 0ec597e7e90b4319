"""What the YAML reader reads, what it refuses and in which line, and that nothing else ever comes out of it."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from quantizers.system.errors import CalibrationError, InputError, RecipeError
from quantizers.system.schema import load
from quantizers.system.strict_yaml import dump, parse

PROPERTY = settings(
    derandomize=True, deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

AS_TEXT = ("no", "yes", "on", "Off", "y", "0x10", "0o17", "1_000", "12:30:45", "2001-01-01", "1.2.3", "e5", "=")
STEPS = 1000  # lines of Python for each character that parsing may take; in quadratic time it takes as many as it has


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.Inf", -math.inf),
        ("+3", 3),
        ("007", 7),
        ("False", False),
        ("~", None),
        ("", None),
        *((text, text) for text in AS_TEXT),
        ("'12'", "12"),
        ('"true"', "true"),
        ('"é\\n"', "é\n"),
        ("|\n  two\n  lines", "two\nlines"),
        ("[1, [2], {b: c}]", [1, [2], {"b": "c"}]),
        ("{}", {}),
        ("a b # comment", "a b"),
    ],
)
def test_a_value_is_what_it_looks_like(file: Path, text: str, value: Any) -> None:
    file.write_text(f"a: {text}", encoding="utf-8")
    data, _ = parse(file)
    assert data == {"a": value}
    assert type(data["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "data"), [("", {}), ("# a comment\n", {}), ("---\n", {}), ("\ufeff", {}), ("\ufeffa: 1", {"a": 1})]
)
def test_empty_files_and_byte_order_marks(file: Path, text: str, data: dict[str, int]) -> None:
    file.write_text(text, encoding="utf-8")
    assert parse(file)[0] == data


def test_lines_of_keys_and_items(file: Path) -> None:
    file.write_text("a: 1\nb:\n  - x\n  -\n    c: 2\n")
    _, lines = parse(file)
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 5, ("b", 1, "c"): 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", ":3: a: given twice (first in line 1); keep one"),
        ("a:\n  b: 1\n  b: 1", ":3: a.b: given twice (first in line 2); keep one"),
        ("a: [{b: 1, b: 2}]", ":1: a[0].b: given twice (first in line 1); keep one"),
        ("a: &x 1\nb: *x", ":1: anchors and aliases are not supported; repeat the value"),
        ("a: 1\nb: !!str 5", ":2: tags (`!name`) are not supported; write the plain value"),
        ("a: !!python/object/apply:os.system ['true']", ":1: tags"),
        ("a: ! b", ":1: tags"),
        ("a:\n" + "".join(" " * n + "- \n" for n in range(1, 40)), "nested deeper than 32 levels; flatten it"),
        ("a: " + "{a: " * 40, ":1: nested deeper than 32 levels; flatten it"),
        ("1: a", ":1: a key must be text, not '1'; put it in quotes"),
        ("~: a", ":1: a key must be text, not '~'"),
        ("? [a]\n: b", ":1: a key must be text, not a list or mapping"),
        ("a: 1" + "0" * 5000, ": not valid YAML: Exceeds the limit"),
        ("a:\n\tb: 1", ":2: not valid YAML"),
        ("a: [1,\n", ":2: not valid YAML"),
        ("a: 'x", ":1: not valid YAML"),
        ('a: "\\UFFFFFFFF"', ": not valid YAML"),
        ("a: 1\nb: \x07", ":2: not valid YAML: control characters are not allowed; remove this character"),
        ("- a", ":1: must be a mapping; write keys with values"),
        ("# " + "x" * 200_000, ": larger than 200,000 bytes"),
    ],
)
def test_what_is_refused(file: Path, text: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(RecipeError) as failure:
        parse(file, RecipeError)
    assert str(failure.value).startswith(str(file))
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


def test_not_utf8_names_the_line(file: Path) -> None:
    file.write_bytes("a: é\nb: ü\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"x\.yaml:1: not UTF-8; save the file as UTF-8"):
        parse(file)


@pytest.mark.parametrize("name", ["missing.yaml", ".", "x" * 300])
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(CalibrationError, match=r"cannot be read \(.+\); give an existing file"):
        parse(tmp_path / name, CalibrationError)


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 60_000, "a: " + "{a: " * 45_000, "- " * 90_000, "? " * 90_000, "a: [" + "[]," * 2_000 + "]"],
    ids=["brackets", "braces", "dashes", "questions", "wide"],
)
def test_hostile_files_are_answered_soon(file: Path, text: str) -> None:
    """In lines of Python that are run, which a busy machine does not change: so many for each character of the file."""
    file.write_text(text)
    steps, most = 0, STEPS * len(text)

    def step(_frame: FrameType, _event: str, _what: object) -> object:
        nonlocal steps
        steps += 1
        assert steps <= most, "grows faster than the file"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        with contextlib.suppress(InputError):
            parse(file)
    finally:
        sys.settrace(before)
    print(f"{steps / len(text):.1f} steps for each character")


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    inner: Inner | bool = Inner()
    items: list[Inner] = []
    share: float = 0.5


def test_every_mistake_has_a_line_of_its_own(file: Path) -> None:
    """In the order of the lines, and what a union's members say of one value in one line."""
    file.write_text("qqq: 1\ninner: no\nshare: x\nitems:\n- {size: 1, siez: 2}\n- size: y\n")
    with pytest.raises(RecipeError) as failure:
        load(file, Outer, RecipeError)
    assert str(failure.value).replace(str(file), "x.yaml").split("\n") == [
        "x.yaml:1: name: missing; add it",
        "x.yaml:1: qqq: unknown key; remove it",
        "x.yaml:2: inner: must be a mapping of keys to values or should be a valid boolean, not 'no'",
        "x.yaml:3: share: should be a valid number, not 'x'",
        "x.yaml:5: items[0].siez: unknown key (did you mean size?)",
        "x.yaml:6: items[1].size: should be a valid integer, not 'y'",
    ]


# Anything at all.

# fmt: off
PIECES = st.sampled_from([
    "a", "name", "inner", "items", "size", "share", ":", ": ", "- ", "\n", "\n  ", "[", "]", "{", "}", ",", "&a ", "*a",
    "!!str ", "!x ", "'", '"', "|", ">", "? ", "#", "%TAG", "---", "...", "1e-4", "1", "no", "\t", "\\", "\x85", "é",
    "\\x", "\\U0011FFFF", "\ud800", "\0", "\ufeff", "<<", "=", "~", "null", ".nan", "9" * 30, "@", "`",
])
# fmt: on


def encoded(pieces: list[str]) -> bytes:
    return "".join(pieces).encode("utf-8", "surrogatepass")


@PROPERTY
@given(raw=st.lists(PIECES, max_size=25).map(encoded) | st.binary(max_size=60))
@example(raw=encoded(['"\\ud800": 1']))
@example(raw=encoded(["name: ", '"\\ud800"']))
@example(raw=encoded(["? "] * 40))
def test_any_bytes_are_read_or_refused(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    said = str(file)
    try:
        load(file, Outer, RecipeError)
    except RecipeError as failure:
        said = str(failure)
    assert all(line.startswith(str(file)) for line in said.split("\n"))


PLAIN = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8)
NESTED = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)


# Texts that one schema or the other reads as something else; the third is the beginning of a SHA-256.
MISTAKABLE = ("1e5", "-012", "8527606296269e61", "no", "null", "~", "", ".inf", "1_000", "12:30:45", "2026-11-22", "=")
TEXT = st.sampled_from(MISTAKABLE) | st.text(max_size=8)


@settings(PROPERTY, max_examples=200)
@given(data=st.dictionaries(TEXT, NESTED | TEXT | st.floats(allow_nan=False), max_size=3), short=st.booleans())
def test_what_is_written_is_read_back(file: Path, data: dict[str, Any], short: bool) -> None:
    """By our own reader and by PyYAML's, which follows YAML 1.1."""
    text = dump(data, short_in_one_line=short)
    file.write_bytes(text.encode())
    assert parse(file)[0] == data
    assert yaml.safe_load(text) == data


def test_the_same_object_at_two_places_is_written_twice(file: Path) -> None:
    names = ["hindi", "rust"]
    file.write_text(dump({"first": names, "second": names}))
    assert parse(file)[0] == {"first": names, "second": names}
