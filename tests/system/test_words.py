"""Docstrings begin with a noun or a verb, locals are called what they are, and a statement assigns one or two names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from conftest import REPOSITORY

NAMES = {"one", "found", "said"}  # which say nothing of what they hold
WORDS = {"Of", "Those", "Their", "Room", "What", "How", "Where", "Why"}


def wrong_beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings that begin with one of WORDS, and the first line of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip(",.:;'") in WORDS:
                yield node.body[0].lineno, (ast.get_docstring(node) or "").splitlines()[0]


def wrong_assignments(source: str) -> Iterator[tuple[int, str]]:
    """Lines that bind one of NAMES, or three names or more to as many values, and what is wrong; fields may have them.

    They are keys of what is printed as JSON.
    """
    nodes = list(ast.walk(ast.parse(source)))
    statements = [each for node in nodes if isinstance(node, ast.ClassDef) for each in node.body]
    fields = [statement.target for statement in statements if isinstance(statement, ast.AnnAssign)]
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES and node not in fields:
            yield node.lineno, f"a variable is called {node.id}"
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            count = len(node.value.elts)
            if isinstance(node.targets[0], ast.Tuple) and count > 2:
                yield node.lineno, f"{count} assignments in one statement"


def wrong_lines(find: Callable[[str], Iterator[tuple[int, str]]]) -> list[str]:
    """What a function finds in the files of the package, with file and line."""
    files = [
        file for folder in ("quantizers", "eval", "stitch") for file in sorted(REPOSITORY.glob(f"{folder}/**/*.py"))
    ]
    assert files
    return [
        f"{file.relative_to(REPOSITORY)}:{line}: {text}"
        for file in files
        for line, text in find(file.read_text(encoding="utf-8"))
    ]


def test_a_docstring_begins_with_a_noun_or_a_verb() -> None:
    source = '"""Why."""\nclass A:\n    """Of it."""\n\n    def f():\n        """Whatever it is."""\n'
    assert list(wrong_beginnings(source)) == [(1, "Why."), (3, "Of it.")]
    wrong = wrong_lines(wrong_beginnings)
    assert not wrong, "\n".join(["docstrings that begin with neither a noun nor a verb:", *wrong])


def test_a_variable_has_a_name_and_a_statement_of_its_own() -> None:
    source = "a, b = 1, 2\nx, y, z = f()\nx, y, z = 1, 2, 3\nrows = [one for one in rows]\n"
    assert [line for line, _ in wrong_assignments(source)] == [3, 4]
    wrong = wrong_lines(wrong_assignments)
    assert not wrong, "\n".join(wrong)
