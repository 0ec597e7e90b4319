"""The docs that are made from the program, the shipped recipes, and what every command says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_reference import _commands, pages

from quantizers.cli import main as cli
from quantizers.recipe.catalogue import copied, new_recipe, rows
from quantizers.recipe.read import read_recipe, set_location, shipped_recipe, source_location
from quantizers.system.errors import InputError, OutputError, RecipeError
from quantizers.system.package_data import shipped

COMMANDS, PAGES = list(_commands(cli.app)), pages()


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["quantize", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_generated_page_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run scripts/make_reference.py"


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS])
def test_every_command_has_an_example_of_itself(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words.split(), "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert run(monkeypatch, *words.split(), "-h") == 0
    assert " ".join(capsys.readouterr().out.split()) == text
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


def test_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    name = "tiny-minimax-m2-fp8-int4"
    assert run(monkeypatch, "recipes") == 0
    listed = capsys.readouterr().out
    assert name in listed
    assert run(monkeypatch, "recipes", "list") == 0
    assert capsys.readouterr().out == listed
    assert run(monkeypatch, "recipes", "show", name) == 0
    assert capsys.readouterr().out == shipped_recipe(name).read_text()
    target = tmp_path / "copy.yaml"
    assert run(monkeypatch, "recipes", "copy", name, str(target)) == 0
    assert run(monkeypatch, "plan", str(target)) == 0
    target.write_text("mine")
    assert run(monkeypatch, "recipes", "copy", name, str(target)) == OutputError.exit_code
    assert f"{target}: exists" in capsys.readouterr().err
    assert run(monkeypatch, "new", "MiniMaxAI/MiniMax-M2.1", str(tmp_path / "new.yaml")) == 0
