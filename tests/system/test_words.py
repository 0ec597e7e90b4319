"""Docstrings begin with a noun or a verb, in the plain wording of a paper or a library."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from conftest import REPOSITORY

WORDS = {"Of", "Those", "Their", "Room", "What", "How", "Where", "Why"}


def wrong_beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Lines of docstrings that begin with one of WORDS, and the first line of each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip(",.:;'") in WORDS:
                yield node.body[0].lineno, (ast.get_docstring(node) or "").splitlines()[0]


def test_a_docstring_begins_with_a_noun_or_a_verb() -> None:
    source = '"""Why."""\nclass A:\n    """Of it."""\n\n    def f():\n        """Whatever it is."""\n'
    assert list(wrong_beginnings(source)) == [(1, "Why."), (3, "Of it.")]
    files = [
        file for folder in ("quantizers", "eval", "stitch") for file in sorted(REPOSITORY.glob(f"{folder}/**/*.py"))
    ]
    assert files
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{line}: {text}"
        for file in files
        for line, text in wrong_beginnings(file.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(["docstrings that begin with neither a noun nor a verb:", *wrong])
