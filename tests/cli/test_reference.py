"""The docs that are made from the program, the shipped recipes, and what every command says of itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Command
from conftest import REPOSITORY
from every_key import OFF
from make_reference import _commands, pages

from quantizers.cli import main as cli
from quantizers.recipe.catalogue import copied, new_recipe, rows
from quantizers.recipe.read import changes_of, read_recipe, set_location, shipped_recipe, source_location
from quantizers.system.errors import InputError, OutputError, RecipeError
from quantizers.system.shipped import shipped

COMMANDS, PAGES = list(_commands(cli.app)), pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run scripts/make_reference.py"


def test_the_recipe_with_every_key_is_the_default_one(command: Command, tmp_path: Path) -> None:
    path = REPOSITORY / "examples" / "every-key.yaml"
    assert command("plan", path) == 0
    least = tmp_path / "least.yaml"
    least.write_text(
        "source: {model: ../models/tiny-minimax-m2}\ncalibration: embedded\n"
        "verify: {coverage: {}, perplexity: {data: held-out}}\n",
        encoding="utf-8",
    )
    assert read_recipe(str(path))[0].settings() == read_recipe(str(least))[0].settings()


@pytest.mark.parametrize("key", OFF)
def test_a_key_that_is_off_may_be_switched_on(key: str, tmp_path: Path) -> None:
    """Without its `#`, and with the keys beside it as is said; without those it is refused."""
    text = (REPOSITORY / "examples" / "every-key.yaml").read_text(encoding="utf-8")
    for name in [key, *(parent for parent in OFF if key.startswith(f"{parent}."))]:
        text, found = re.subn(rf"^( *)#({name.rpartition('.')[2]}:)", r"\1\2", text, flags=re.MULTILINE)
        assert found == 1
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    read_recipe(str(path), changes_of(OFF[key].beside))
    if OFF[key].beside:
        with pytest.raises(RecipeError, match=key):
            read_recipe(str(path))


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS])
def test_every_command_has_an_example_of_itself(words: str, command: Command) -> None:
    assert command(*words.split(), "--help") == 0
    text = " ".join(command.out.split())
    assert command(*words.split(), "-h") == 0
    assert " ".join(command.out.split()) == text
    assert f"Example: quantize {words}" in text


@pytest.mark.parametrize("name", [row["name"] for row in rows()])
def test_a_copied_recipe_means_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(copied(name))
    mine, _ = read_recipe(str(path))
    theirs, their_path = read_recipe(name)
    assert mine.experts == theirs.experts
    assert source_location(mine, path) == source_location(theirs, their_path)
    assert set_location(mine.calibration_set, path).samefile(set_location(theirs.calibration_set, their_path))
    assert mine.calibration_tokens == theirs.calibration_tokens


def test_a_new_recipe_means_what_the_shipped_one_does(tmp_path: Path) -> None:
    path = tmp_path / "new.yaml"
    path.write_text(new_recipe("MiniMaxAI/MiniMax-M2.1"))
    new, _ = read_recipe(str(path))
    theirs, _ = read_recipe("minimax-m2.1-fp8-int4")
    assert new.experts == theirs.experts
    assert new.source == theirs.source
    assert set_location(new.calibration_set, path) == shipped("calibration") / "software-engineer.yaml"


def test_what_is_not_known() -> None:
    with pytest.raises(InputError, match=r"foo: neither a checkpoint folder nor a Hub id \(owner/name\); correct it"):
        new_recipe("foo")
    for name in ("nothing", "../recipes/minimax-m2-fp8-int4"):
        with pytest.raises(RecipeError, match="no such recipe"):
            shipped_recipe(name).read_text()


def test_the_commands(command: Command, tmp_path: Path) -> None:
    name = "tiny-minimax-m2-fp8-int4"
    assert command("recipes") == 0
    listed = command.out
    assert name in listed
    assert command("recipes", "list") == 0
    assert command.out == listed
    assert command("recipes", "show", name) == 0
    assert command.out == shipped_recipe(name).read_text()
    target = tmp_path / "copy.yaml"
    assert command("recipes", "copy", name, str(target)) == 0
    assert command("plan", str(target)) == 0
    target.write_text("mine")
    assert command("recipes", "copy", name, str(target)) == OutputError.exit_code
    assert f"{target}: exists" in command.err
    assert command("new", "MiniMaxAI/MiniMax-M2.1", str(tmp_path / "new.yaml")) == 0
