"""How a recipe is called: by file, by name, by a model's Hub id; and what is suggested for a name that is near."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Command

from quantizers.calibration.set import read_set
from quantizers.calibration.set_files import rows
from quantizers.recipe.read import find_recipe, read_recipe, set_location, shipped_recipe
from quantizers.system.errors import RecipeError
from quantizers.system.shipped import shipped, shipped_names

LISTED = "give a file, or a name that `quantize recipes` lists"


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("tiny-minimax-m2-fp8-int4", "tiny-minimax-m2-fp8-int4"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2-fp8-int4"),
        ("minimaxai/minimax-m2.5", "minimax-m2.5-fp8-int4"),  # the Hub knows no upper case either
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b-instruct-int4"),
    ],
)
def test_a_model_with_one_recipe_stands_for_it(name: str, recipe: str) -> None:
    assert find_recipe(name) == shipped_recipe(name) == shipped("recipes") / f"{recipe}.yaml"


@pytest.mark.parametrize("find", [find_recipe, shipped_recipe])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "MiniMaxAI/MiniMax-M2.1",
            "8 recipes are shipped for this model; name one: minimax-m2.1-bf16-int4, minimax-m2.1-fp8-1x96gb, "
            "minimax-m2.1-fp8-96gb, minimax-m2.1-fp8-int3, minimax-m2.1-fp8-int4, minimax-m2.1-fp8-int4-131k, "
            "minimax-m2.1-fp8-int4-kv8, minimax-m2.1-fp8-nvfp4",
        ),
        (
            "minimax-m2.1",
            "no such recipe (did you mean minimax-m2.1-fp8-96gb or minimax-m2.1-fp8-int3 or minimax-m2.1-fp8-int4?); "
            + LISTED,
        ),
        ("minimax-m21-fp8-int4", "no such recipe (did you mean minimax-m2.1-fp8-int4?); " + LISTED),
        ("MiniMaxAI/MiniMax-M27", "no such recipe (did you mean MiniMaxAI/MiniMax-M2.7?); " + LISTED),
        ("me/new-1.0", f"no such recipe; {LISTED}, or write one for this model: `quantize new me/new-1.0`"),
        ("me/new.yaml", f"no such recipe; {LISTED}"),
        ("nothing at all", "no such recipe; " + LISTED),
        (
            "Qwen/Qwen3-30B-A3B-FP8",
            "no recipe is shipped for this model; `quantize new Qwen/Qwen3-30B-A3B-FP8` writes one",
        ),
    ],
)
def test_what_is_said_of_any_other_name(find: object, name: str, said: str) -> None:
    assert callable(find)
    with pytest.raises(RecipeError) as refused:
        find(name)
    assert str(refused.value) == f"{name}: {said}"


def test_a_model_s_folder_is_no_recipe(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The remedy that the line names works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model)
    assert command("plan", "model") == 2
    assert command.err == (
        "quantize: model: is a model's folder, no recipe; `quantize new model` writes a recipe for it\n"
    )
    assert command("new", "model") == 0
    written = json.loads(json.dumps(command.out)).split("; ")[0].removeprefix("wrote ")
    assert command("plan", written) == 0


def test_a_recipe_for_what_no_recipe_could_quantize_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Before, `new` wrote one that every command then refused."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("odd", '{"model_type": "foo_moe", "num_experts": 3}'), ("none", "{}"), ("cut", '{"a": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("odd", "odd/config.json: model_type 'foo_moe': "),
        ("none", "none/config.json: model_type is missing; give a transformers checkpoint"),
        ("cut", "cut/config.json:1: not valid JSON; download this file again"),
        ("empty", "empty/config.json: cannot be read (No such file or directory); check the folder"),
    ):
        assert command("new", name) == 2
        assert command.err.startswith(f"quantize: {said}")
        assert command.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "empty", "none", "odd"]


def test_copy_names_the_file_after_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("recipes", "copy", "MiniMaxAI/MiniMax-M2") == 0
    assert (tmp_path / "minimax-m2-fp8-int4.yaml").is_file()
    assert command("recipes", "show", "minimax-m2-fp8") == 2
    assert "(did you mean minimax-m2-fp8-int4?)" in command.err


@pytest.mark.parametrize(
    "words",
    [
        ("coverage", "--model", "x", "--data", "embeded"),
        ("calibration", "embeded"),
        ("eval", "x", "y", "--data", "embeded"),
        ("plan", "tiny-minimax-m2-fp8-int4", "--calibration", "embeded"),
        ("plan", "r.yaml"),
    ],
)
def test_a_set_s_name_that_is_near_is_suggested(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("source: {model: a/b}\ncalibration: embeded\n")
    assert command(*words) == 2
    assert "embeded: no such " in (said := command.err)
    assert "(did you mean embedded?); " in said


LARGE = [name for name in shipped_names("recipes") if not name.startswith("tiny")]
PART = "minimax-m2.1-fp8-int4-131k"


def comment(name: str) -> str:
    """The comment at the head of a shipped recipe, in one line."""
    lines = (shipped("recipes") / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@pytest.fixture(scope="module")
def samples() -> dict[str, str]:
    """The number of samples of each shipped set, by its name."""
    return {row["name"]: row["samples"] for row in rows()}


@pytest.mark.parametrize("name", LARGE)
def test_the_set_is_as_large_as_the_recipe_says(name: str, samples: dict[str, str]) -> None:
    recipe, path = read_recipe(name)
    calibration = read_set(set_location(recipe.calibration_set, path))
    assert f"{samples[set_location(recipe.calibration_set, path).stem]} samples of " in comment(name)
    assert f"{len({source.dataset for source in calibration.sources})} data sets" in comment(name)
    if name == PART:
        assert recipe.calibration_tokens == 131_072
    else:
        assert f"samples of up to {calibration.lengths[-1]:,} tokens" in comment(name)
        assert recipe.calibration_tokens is None


def test_the_two_recipes_of_one_model_differ_in_nothing_but_the_tokens() -> None:
    whole, part = (read_recipe(name)[0].settings() for name in ("minimax-m2.1-fp8-int4", PART))
    assert part == whole | {"calibration": {"set": whole["calibration"], "tokens": 131_072}}
