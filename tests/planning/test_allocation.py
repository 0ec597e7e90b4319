"""The choice against trying everything; what a budget leaves to choose from."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import published, tiny_model

from quantizers.formats.packed_integers import CANDIDATES, Integers
from quantizers.planning.allocation import Allocation, allocation, candidates, cheapest_loss
from quantizers.planning.plan import file_size
from quantizers.recipe.schema import Experts, counted
from quantizers.system.errors import RecipeError
from quantizers.system.formatting import size_from

# Whole numbers, many of them equal, so that ties occur; and any float.
LOSS = st.one_of(st.integers(0, 4).map(float), st.floats(0, 1e3, allow_subnormal=False))
LAYER = st.lists(st.tuples(st.integers(0, 12), LOSS), min_size=1, max_size=4)


def by_trying(costs: list[list[int]], losses: list[list[float]], limit: int) -> tuple[float, int] | None:
    """Loss and cost of the best of all choices."""
    best = None
    for choice in itertools.product(*(range(len(row)) for row in costs)):
        cost = sum(row[i] for row, i in zip(costs, choice, strict=True))
        loss = math.fsum(row[i] for row, i in zip(losses, choice, strict=True))
        if cost <= limit and (best is None or (loss, cost) < best):
            best = loss, cost
    return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(LAYER, min_size=1, max_size=5), st.integers(0, 60))
def test_within_one_upgrade_of_trying_everything(layers: list[list[tuple[int, float]]], limit: int) -> None:
    costs = [sorted(c for c, _ in row) for row in layers]
    losses = [[loss for _, loss in row] for row in layers]
    expected = by_trying(costs, losses, limit)
    if expected is None:
        return  # such limits are refused when the plan is made
    found = cheapest_loss(costs, losses, limit)
    assert sum(row[i] for row, i in zip(costs, found, strict=True)) <= limit
    lost = math.fsum(row[i] for row, i in zip(losses, found, strict=True))
    assert lost <= expected[0] + max(row[0] - min(row) for row in losses) + 1e-9


def test_upgrades_go_where_they_gain_most() -> None:
    assert cheapest_loss([[3, 4, 5]], [[1.0, 1.0, 1.0]], 9) == [0]
    assert cheapest_loss([[3, 5], [3, 5]], [[1.0, 0.0], [3.0, 1.0]], 8) == [0, 1]
    assert cheapest_loss([[3, 5], [3, 4]], [[4.0, 0.0], [1.0, 0.5]], 9) == [1, 1]
    assert cheapest_loss([[3, 9], [3, 4]], [[40.0, 0.0], [1.0, 0.5]], 8) == [0, 1], "what fits of the rest"


# What a recipe leaves to choose from ---------------------------------------------------------------


def of(limit: str | float, parallel: int | None = None, **changes: int) -> Allocation:
    model, key = tiny_model(**changes), "budget" if isinstance(limit, str) else "bits_per_weight"
    experts = Experts.model_validate({key: limit, "tensor_parallel": parallel})
    return allocation(model.plan(), model.facts, experts, "r.yaml:6: experts." + key)


def test_candidates_are_what_vllm_takes() -> None:
    assert list(CANDIDATES) == sorted(CANDIDATES, key=lambda scheme: scheme.bits_per_weight)
    facts = published("MiniMaxAI/MiniMax-M2.1", layers=1).facts
    assert [len(candidates(facts, parallel)) for parallel in (1, 2, 4, 8, 16, 32)] == [12, 12, 12, 8, 4, 0]
    small = tiny_model(intermediate_size=64).facts
    assert {scheme.group_size for scheme in candidates(small, 1)} == {32, 64}
    assert {scheme.group_size for scheme in candidates(small, 2)} == {32}


def test_costs_are_the_files_bytes() -> None:
    plan = tiny_model(num_hidden_layers=12, intermediate_size=128).plan()
    found = of("1GB", num_hidden_layers=12, intermediate_size=128)
    for number, scheme in enumerate(found.candidates):
        sizes = [file_size(tensors) for tensors in plan.with_schemes([scheme] * 12).shards().values()]
        assert [row[number] for row in found.shard_bytes] == sizes[:-1]
        assert found.output_bytes(found.uniform(number)) == sum(sizes)
    assert found.exceeded
    assert [row["tensor_parallel"] for row in found.as_dict()["candidates"]] == [[1], [1, 2], [1, 2, 4]] * 2
    assert found.best_uniform() == [Integers(8, 32)] * 12
    losses = [{str(scheme): 1 / scheme.bits_per_weight for scheme in found.candidates}] * 12
    assert found.schemes(found.choose(losses)) == [Integers(8, 32)] * 12


def test_layers_without_experts_have_no_choice_and_are_paid_for() -> None:
    """DeepSeek-V3 with few layers and experts: three dense layers, and one that predicts further tokens."""
    model = published("deepseek-ai/DeepSeek-V3", layers=6, experts=16)
    plan = model.plan()
    for limit in ({"budget": "100GB"}, {"bits_per_weight": 4.6}):
        found = allocation(plan, model.facts, Experts.model_validate(limit), "r.yaml:6: experts")
        assert found.layers == (3, 4, 5)
        chosen = [0, len(found.candidates) - 1, 1]
        schemes = found.schemes(chosen)
        assert schemes == [found.candidates[i] for i in (0, 0, 0, *chosen)]
        files = plan.with_schemes(schemes).shards()
        assert found.output_bytes(chosen) == sum(map(file_size, files.values()))
        assert len(files) == 6 + 1 + 1
    experts = 3 * 16 * 7168 * 2048
    assert found.limit == math.floor(4.6 * 3 * experts)
    assert found.as_dict()["limit"] == pytest.approx(4.6)


def test_a_budget_of_a_uniform_choice_is_never_worse_than_it() -> None:
    at = of(2.125, num_hidden_layers=6, intermediate_size=128)
    assert at.candidates == CANDIDATES
    losses = [{str(s): (layer + 1) * s.group_size**0.5 / 4**s.bits for s in at.candidates} for layer in range(6)]
    for number, scheme in enumerate(at.candidates):
        exact = of(f"{at.output_bytes(at.uniform(number))}B", num_hidden_layers=6, intermediate_size=128)
        found = exact.choose(losses)
        assert exact.output_bytes(found) <= exact.limit
        picked = sum(row[str(s)] for row, s in zip(losses, exact.schemes(found), strict=True))
        assert picked <= sum(row[str(scheme)] for row in losses)
        weighed = of(scheme.bits_per_weight, num_hidden_layers=6, intermediate_size=128)
        assert weighed.bits_per_weight(weighed.choose(losses)) <= scheme.bits_per_weight
        assert weighed.best_uniform()[0] == scheme


def test_fewer_than_4_bits_are_possible_only_where_4_do_not_fit_everywhere() -> None:
    assert {scheme.bits for scheme in of(4.2499).candidates} == {2, 3, 4, 8}
    for limit in (4.25, 8.5, "1GB"):
        found = of(limit)
        assert {scheme.bits for scheme in found.candidates} == {4, 8}
        assert all(len(row) == len(found.candidates) for row in found.shard_bytes)


def test_what_is_too_small_is_refused_with_what_would_do() -> None:
    least = of(2.25).output_bytes(of(2.25).uniform(0))
    of(f"{least}B")
    of(size_from(least))
    with pytest.raises(
        RecipeError, match=rf"^r.yaml:6: experts.budget: .* give {re.escape(size_from(least))} or more$"
    ):
        of(f"{least - 1}B")
    with pytest.raises(RecipeError, match=r"^r.yaml:6: experts.bits_per_weight: 2.2 is less .* give 2.25 or more$"):
        of(2.2)
    with pytest.raises(
        RecipeError, match=r"no group of 32, 64 or 128 divides .* 64 over 4 GPUs; give experts\.tensor_parallel: 2"
    ):
        of("1GB", parallel=4)


def test_schemes_in_words() -> None:
    assert counted([Integers(4, 64)] * 3) == "INT4 group 64"
    assert (
        counted([Integers(8, 64), Integers(4, 32), Integers(4, 32)])
        == "INT4 group 32 (2 layers), INT8 group 64 (1 layer)"
    )
