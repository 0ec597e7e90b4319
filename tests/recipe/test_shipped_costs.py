"""What a shipped recipe says that it costs, against what `quantize plan` computes and what its set holds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from quantizers.architectures.families import all_published
from quantizers.calibration.set import read_set
from quantizers.plan.job import Job, prepare
from quantizers.plan.run_needs import estimate_run
from quantizers.plan.summary import summary
from quantizers.recipe.changes import changes_of
from quantizers.recipe.locations import set_location
from quantizers.recipe.schema import read_recipe
from quantizers.system.progress import duration
from quantizers.system.shipped import shipped, shipped_names

LARGE = [name for name in shipped_names("recipes") if not name.startswith("tiny")]
PART = "minimax-m2.1-fp8-int4-131k"


def comment(name: str) -> str:
    """The comment at the head of a shipped recipe, in one line."""
    lines = (shipped("recipes") / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def on_a_gpu(job: Job) -> str:
    """The computed time in whole minutes, as `quantize plan` prints it but for seconds."""
    needs = estimate_run(job, int(str(summary(job.plan, job.sizes)["output_bytes"])))
    assert needs.seconds is not None
    return re.sub(r" \d\d s$", "", duration(needs.seconds["GPU"]["all"]))


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


def alike() -> list[list[str]]:
    """The shipped recipes with the whole set, those of models with the same config.json together."""
    groups: dict[int, list[str]] = {}
    for name in LARGE:
        model = read_recipe(name)[0].source.model
        (size,) = (id(published) for _, published in all_published() if model in published.models)
        groups.setdefault(size, []).append(name)
    return [[name for name in names if name != PART] for names in groups.values()]


@pytest.mark.parametrize(
    "names",
    [pytest.param(names, id=names[0], marks=() if "mixtral" in names[0] else pytest.mark.slow) for names in alike()],
)
def test_the_time_is_what_the_plan_computes(names: list[str]) -> None:
    whole = prepare(names[0], offline_facts=True)
    drawn, _ = read_recipe(names[0], changes_of(["calibration.tokens=131072"]))
    computed = on_a_gpu(whole), on_a_gpu(replace(whole, recipe=drawn))
    for name in names:
        told = re.findall(r"Computed by .*?, not measured: (.*?) on one GPU, if .*? long; (.*?) with ", comment(name))
        assert told == [computed]
        if name in PART:
            assert f"Computed by `quantize plan`, not measured: {computed[1]} on one GPU." in comment(PART)


def test_the_two_recipes_of_one_model_differ_in_nothing_but_the_tokens() -> None:
    whole, part = (read_recipe(name)[0].settings() for name in ("minimax-m2.1-fp8-int4", PART))
    assert part == whole | {"calibration": {"set": whole["calibration"], "tokens": 131_072}}
