"""Every command line that a page shows is one that the program takes: its command, arguments and options are there."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from pages import pages, read_page

from quantizers.cli.main import app


def lines() -> list[tuple[str, list[str]]]:
    """Page and words of every command that a page has, marked ones and those that the program prints too."""
    read = [read_page(path) for path in pages()]
    return [
        (page.path.name, words)
        for page in read
        for command in (*page.commands, *page.shown)
        for words in command.calls()
    ]


LINES = lines()


def silenced(command: Any, taken: list[dict[str, Any]]) -> Any:
    """The command, and those in it, with a function that only notes what it is called with."""
    command.callback = lambda **given: taken.append(given)
    for inner in getattr(command, "commands", {}).values():
        silenced(inner, taken)
    return command


def test_there_are_examples_on_every_page_of_use() -> None:
    assert len(LINES) > 60
    assert {"README.md", "calibration.md", "recipe.md", "publish.md", "commands.md"} <= {page for page, _ in LINES}


@pytest.fixture(scope="module")
def program() -> tuple[Any, list[dict[str, Any]]]:
    """The silenced program, and what its commands are called with."""
    taken: list[dict[str, Any]] = []
    return silenced(typer.main.get_command(app), taken), taken


@pytest.mark.parametrize(("page", "words"), LINES, ids=[f"{page}: {' '.join(words)}" for page, words in LINES])
def test_a_documented_command_is_taken(page: str, words: list[str], program: tuple[Any, list[dict[str, Any]]]) -> None:
    command, taken = program
    taken.clear()
    command.main(words, prog_name="quantize", standalone_mode=False)
    assert taken


def test_a_command_that_does_not_exist_would_be_noticed(program: tuple[Any, list[dict[str, Any]]]) -> None:
    for words in (["run"], ["run", "x", "--outputs", "y"], ["publishes", "x"], ["calibration", "copy", "embedded"]):
        with pytest.raises(Exception, match=r"Missing|No such"):
            program[0].main(words, prog_name="quantize", standalone_mode=False)
