"""A recipe with `calibration: {set: …, tokens: …}`, from the plan to the card and back from the finished folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import Command
from runs import change, hashes
from tiny import write_job

from quantizers.calibration.load_set import load_set
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.estimate import estimate_run
from quantizers.planning.job import prepare
from quantizers.recipe.portable import settings_hash
from quantizers.recipe.read import read_recipe
from quantizers.recipe.schema import Recipe
from quantizers.system.errors import RecipeError

CPU = torch.device("cpu")
TOKENS, POSITIONS = 301, 150


def drawn(recipe: Path, tokens: int | None) -> Path:
    """The recipe, now with so many tokens of its set."""
    change(recipe, lambda body: body.update(calibration={"set": "calibration.yaml", "tokens": tokens}))
    return recipe


def cut_positions(recipe: Path) -> None:
    """Give the recipe's model fewer positions than its longest texts have tokens."""
    config = recipe.parent / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": POSITIONS}))


def test_a_run_is_calibrated_on_what_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers see these tokens, report and card say so, and the finished folder makes the same bytes again.

    Of a model with fewer positions than its longest texts, whose ends are not calibrated on.
    """
    recipe = drawn(write_job(tmp_path / "job", layers=1, samples=6), TOKENS)
    cut_positions(recipe)
    output, again = tmp_path / "output", tmp_path / "again"
    report = run(prepare(str(recipe)), Options(output, CPU))
    of_model = tmp_path / "job" / "calibration.yaml", tmp_path / "job" / "model"
    expected, whole = (load_set(*of_model, tokens=tokens, positions=POSITIONS) for tokens in (TOKENS, None))
    assert (max(len(sample.tokens) for sample in expected.samples)) == POSITIONS
    assert report["calibration"]["notes"] == list(whole.notes)
    assert "positions of the model are cut there" in whole.notes[0]
    assert report["calibration"]["digest"] == expected.digest != whole.digest
    assert report["calibration"]["tokens"] == report["coverage"]["forced"]["tokens"] == TOKENS
    total = sum(len(sample.tokens) for sample in whole.samples)
    assert report["calibration"]["drawn"] == {"asked": TOKENS, "samples": 6, "tokens": total, "cut": 1}
    assert (
        f"{TOKENS} tokens were drawn evenly over the categories of the set's 6 samples with {total:,} tokens; samples "
        "cut where their category's share ended: 1."
    ) in (output / "README.md").read_text()
    assert f"calibration, {TOKENS} tokens drawn from it (digest" in (output / "report.html").read_text()
    published = yaml.safe_load((output / "recipe.yaml").read_text())
    assert published["calibration"] == {"set": "calibration.yaml", "tokens": TOKENS}
    for file in (tmp_path / "job").glob("*.jsonl"):
        assert not (output / file.name).exists()
    assert run(prepare(str(recipe)), Options(output, CPU, with_data=True))["already_done"]
    same = prepare(str(output / "recipe.yaml"), source_folder=tmp_path / "job" / "model")
    repeated = run(same, Options(again, CPU, with_data=True))
    assert repeated["settings"]["hash"] == report["settings"]["hash"]
    assert hashes(again) == hashes(output)
    assert "holds fewer than calibration.tokens" not in capsys.readouterr().err


def test_more_tokens_than_the_set_holds_are_the_whole_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_job(tmp_path / "job", layers=1, samples=6)
    whole = load_set(tmp_path / "job" / "calibration.yaml", tmp_path / "job" / "model")
    report = run(prepare(str(drawn(recipe, 10**6))), Options(tmp_path / "output", CPU))
    tokens = sum(len(sample.tokens) for sample in whole.samples)
    note = f"calibration: calibration holds fewer than calibration.tokens, {tokens:,} of 1,000,000: all are"
    assert [line for line in capsys.readouterr().err.splitlines() if "calibration.tokens" in line] == [f"{note} used"]
    assert report["calibration"]["digest"] == whole.digest
    assert (
        "That is the whole set; the recipe would have drawn 1,000,000"
        in (tmp_path / "output" / "README.md").read_text()
    )


def test_the_plan_counts_the_tokens_that_are_drawn(tmp_path: Path, command: Command) -> None:
    recipe = write_job(tmp_path / "job", layers=1, samples=6)
    whole = estimate_run(prepare(str(recipe)), 1000)
    assert whole.tokens == 6 * 256
    part = estimate_run(prepare(str(drawn(recipe, TOKENS))), 1000)
    assert part.tokens == TOKENS
    assert part.states is not None
    assert whole.states is not None
    assert part.states["CPU"] / TOKENS == whole.states["CPU"] / (6 * 256)
    assert estimate_run(prepare(str(drawn(recipe, 10**6))), 1000) == whole
    assert command("plan", drawn(recipe, TOKENS)) == 0
    said = command.out
    assert f"a run with its {TOKENS} tokens at most and 1,536 evaluation tokens needs about" in said
    assert "  tokens: the recipe's calibration.tokens; every evaluation text as long as" in said


def test_a_set_of_unknown_size_is_bounded_by_the_tokens_drawn(tmp_path: Path) -> None:
    recipe = drawn(write_job(tmp_path / "job", layers=1, samples=6), TOKENS)
    source = {"dataset": "a/b", "columns": ["t"], "shape": "text", "samples": "all", "category": "c"}
    change(tmp_path / "job" / "calibration.yaml", lambda body: body.update(sources=[source]))
    assert estimate_run(prepare(str(recipe)), 1000).tokens == TOKENS


def test_coverage_of_a_recipe_counts_what_is_drawn(tmp_path: Path, command: Command) -> None:
    recipe = drawn(write_job(tmp_path / "job", layers=1, samples=6), TOKENS)
    cut_positions(recipe)
    words = ("coverage", recipe, "--no-picture", "--device", "cpu")
    assert command(*words, "--json") == 0
    assert f"calibration: texts longer than the {POSITIONS} positions of the model are cut there: " in command.err
    found = json.loads(command.out)
    assert sum(found["tokens"].values()) == TOKENS
    assert command(*words) == 0
    assert f"drawn evenly over the categories: {TOKENS} of the set's {found['drawn']['tokens']:,} tokens" in (
        command.out
    )
    named = tmp_path / "job" / "calibration.yaml"
    assert command(*words, "--data", named, "--json") == 0
    assert sum(json.loads(command.out)["tokens"].values()) == found["drawn"]["tokens"]


def test_a_recipe_that_names_all_of_a_set_has_the_settings_that_it_always_had(tmp_path: Path) -> None:
    recipe = write_job(tmp_path / "job", layers=1, samples=6)
    plain, path = read_recipe(str(recipe))
    mapping = {"set": "calibration.yaml"}
    same = Recipe.model_validate(plain.settings() | {"calibration": mapping})
    part = Recipe.model_validate(plain.settings() | {"calibration": mapping | {"tokens": 5}})
    assert plain.settings()["calibration"] == same.settings()["calibration"] == "calibration.yaml"
    assert part.settings()["calibration"] == {"set": "calibration.yaml", "tokens": 5}
    assert Recipe.model_validate(part.settings()) == part
    assert settings_hash(plain, path) == settings_hash(same, path) != settings_hash(part, path)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"set": "c", "tokens": 0}, "calibration.tokens: should be greater than or equal to 1, not 0"),
        ({"set": "c", "tokens": "131k"}, "calibration.tokens: should be a valid integer, not '131k'"),
        ({"set": "c", "tokns": 5}, "calibration.tokns: unknown key (did you mean tokens?)"),
        ({"tokens": 5}, "calibration.set: missing; add it"),
        (5, "calibration: should be a valid string or must be a mapping of keys to values, not 5; put it in quotes"),
    ],
)
def test_what_calibration_refuses(given: Any, said: str, tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    recipe = write_recipe(tmp_path)
    change(recipe, lambda body: body.update(calibration=given))
    with pytest.raises(RecipeError) as failure:
        read_recipe(str(recipe))
    assert str(failure.value) == f"{recipe}:1: {said}"
