"""An error is a place, a problem and a remedy, with an exit code; its text is made of these, and never read back."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPOSITORY

from quantizers.system import errors
from quantizers.system.errors import HubUnavailable, InputError, Interrupted, QuantizeError, RecipeError, from_dicts

CLASSES = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, QuantizeError)}
ROOTS = ("quantizers", "eval", "stitch", "benchmarks", "scripts", "tests")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InputError(Path("a.yaml"), "no such file", "correct the path"), "a.yaml: no such file; correct the path"),
        (InputError("", "no head; no tail", "give both"), "no head; no tail; give both"),
        (InputError("--set a: 1", "has no value"), "--set a: 1: has no value"),
        (QuantizeError("", "the disk is full"), "the disk is full"),
    ],
)
def test_the_text_is_place_problem_and_remedy(error: QuantizeError, text: str) -> None:
    assert str(error) == text
    assert text == error.without_remedy + (f"; {error.remedy}" if error.remedy else "")


def test_as_json_it_says_what_it_was_made_of() -> None:
    error = RecipeError("a.yaml:3: experts.bits: 4", "must be 4; or 8", "give one; of both")
    parts = {"place": "a.yaml:3: experts.bits: 4", "problem": "must be 4; or 8", "remedy": "give one; of both"}
    assert error.as_dict() == {"code": 2, **parts}
    assert HubUnavailable("me/model", "no answer").as_dict()["code"] == 1
    assert Interrupted("", "interrupted", "again", 15).as_dict()["code"] == 143


def test_several_mistakes_are_a_line_each() -> None:
    mistakes = [RecipeError("a.yaml:1", "missing", "add it"), RecipeError("a.yaml:2", "unknown key")]
    error = RecipeError.several(mistakes)
    assert str(error) == "a.yaml:1: missing; add it\na.yaml:2: unknown key"
    assert error.errors == tuple(mistakes)
    more = RecipeError("b.yaml:1", "missing")
    assert RecipeError.several([error, more]).errors == (*mistakes, more)
    assert RecipeError.several(mistakes[:1]) is mistakes[0]
    assert mistakes[0].errors == (mistakes[0],)


@pytest.mark.parametrize("count", [1, 2])
def test_another_process_gets_the_same_error(count: int) -> None:
    error = RecipeError.several([RecipeError(f"a.yaml:{line}", "missing", "add it") for line in range(count)])
    sent = json.loads(json.dumps([each.as_dict() for each in error.errors]))
    received = from_dicts(sent)
    assert (str(received), received.exit_code) == (str(error), 2)
    assert [each.as_dict() for each in received.errors] == sent


def raised_as_one_text(source: str) -> Iterator[int]:
    """Lines in which an error is made of a text alone."""
    for node in ast.walk(ast.parse(source)):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if isinstance(node, ast.Call) and name in CLASSES and name != "PeerFailed":
            given = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            if len(given) == len(node.args) == 1 and not node.keywords:
                yield node.lineno


def test_no_error_is_raised_as_one_text() -> None:
    assert list(raised_as_one_text('raise InputError("a: b; c")\nraise InputError("a", "b", "c")')) == [1]
    files = [file for root in ROOTS for file in (REPOSITORY / root).rglob("*.py")]
    wrong = {str(file.relative_to(REPOSITORY)): list(raised_as_one_text(file.read_text())) for file in files}
    assert {file: lines for file, lines in wrong.items() if lines} == {}
