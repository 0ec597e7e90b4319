"""What a shipped recipe says about its set, against the set."""

from __future__ import annotations

import pytest

from quantizers.calibration.set import read_set
from quantizers.recipe.read import read_recipe, set_location
from quantizers.system.package_data import shipped, shipped_names

LARGE = [name for name in shipped_names("recipes") if not name.startswith("tiny")]
PART = "minimax-m2.1-fp8-int4-131k"


def comment(name: str) -> str:
    """The comment at the head of a shipped recipe, in one line."""
    lines = (shipped("recipes") / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@pytest.mark.parametrize("name", LARGE)
def test_the_set_is_as_large_as_the_recipe_says(name: str) -> None:
    recipe, path = read_recipe(name)
    calibration = read_set(set_location(recipe.calibration_set, path))
    samples = sum(source.samples for source in calibration.sources if source.samples != "all")
    assert not any(source.is_local or source.samples == "all" for source in calibration.sources)
    assert f"{samples} samples of " in comment(name)
    assert f"{len({source.dataset for source in calibration.sources})} data sets of the Hub" in comment(name)
    if name == PART:
        assert recipe.calibration_tokens == 131_072
    else:
        assert f"samples of up to {calibration.lengths[-1]:,} tokens" in comment(name)
        assert recipe.calibration_tokens is None


def test_the_two_recipes_of_one_model_differ_in_nothing_but_the_tokens() -> None:
    whole, part = (read_recipe(name)[0].settings() for name in ("minimax-m2.1-fp8-int4", PART))
    assert part == whole | {"calibration": {"set": whole["calibration"], "tokens": 131_072}}
