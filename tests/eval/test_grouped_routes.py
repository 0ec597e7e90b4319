"""Ranks of experts where a router divides them into groups, against transformers' own router."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.eval.coverage.routing import TIE, ranked
from quantizers.system.errors import ArchitectureError

CONFIG = families.config("deepseek_v3")
TOKENS = 200


@pytest.fixture(scope="module")
def router() -> Any:
    return families.randomized(CONFIG, seed=0).model.layers[1].mlp.gate


@pytest.fixture(scope="module")
def states() -> Tensor:
    return torch.randn(TOKENS, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(3))


def facts_of(**changes: int) -> Architecture:
    return architecture_for(CONFIG | changes, "x")


def choice(router: Any, states: Tensor, *, top_k: int, bias: Tensor) -> Tensor:
    """The experts that transformers' router chooses, (T, top_k) in ascending order."""
    kept, router.e_score_correction_bias, router.top_k = router.e_score_correction_bias, bias, top_k
    chosen: Tensor = router(states)[2].sort().values
    router.e_score_correction_bias, router.top_k = kept, 2
    return chosen


def near(scores: Tensor, facts: Architecture) -> Tensor:
    return ranked(scores, facts)[0].view(len(scores), -1).sort().values


def test_near_are_the_experts_that_the_router_would_choose_next(router: Any, states: Tensor) -> None:
    bias = router.e_score_correction_bias
    scores = router(states)[0].sigmoid()
    wanted = choice(router, states, top_k=4, bias=bias)
    assert torch.equal(near(scores + bias, facts_of()), wanted)
    assert not torch.equal(near(scores, facts_of()), wanted)
    without = facts_of(n_group=1, topk_group=1)
    assert not torch.equal(near(scores + bias, without), wanted)


@pytest.mark.parametrize(
    ("scores", "tied"),
    [
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], False),
        ([0.9, 0.1, 0.8, 0.1, 0.8, 0.0, 0.0, 0.0], False),  # an expert outside ties with one that is chosen
        ([0.9, 0.1, 0.5, 0.5, 0.2, 0.0, 0.0, 0.0], True),  # the second expert chosen with the third
        ([0.9, 0.8, 0.4, 0.3, 0.5, 0.2, 0.0, 0.0], True),  # the second group with the third
        ([0.9, 0.9, 0.4, 0.3, 0.4, 0.2, 0.0, 0.0], False),  # two experts that are both chosen
    ],
)
def test_a_choice_within_a_margin_of_rounding(scores: list[float], tied: bool) -> None:
    """Eight experts in four groups of two; two groups, then two experts in them, are chosen."""
    for nudge in (0.0, TIE / 10, -TIE / 10):
        rows = torch.tensor([scores], dtype=torch.float64)
        rows[0, 3] += nudge
        assert ranked(rows, facts_of())[1].tolist() == [tied]


def test_experts_outside_the_groups_that_are_chosen_are_never_near() -> None:
    """Even if these hold fewer than twice as many as a token chooses."""
    few = facts_of(topk_group=1)
    assert sorted(ranked(torch.tensor([[0.9, 0.8, 0.7, 0.7, 0.5, 0.4, 0.3, 0.2]]), few)[0].tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"topk_group": 5}, "x: topk_group 5 is larger than n_group 4; correct this file"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "topk_group 1 of 4 groups have fewer experts than .*_per_tok 3"),
    ],
)
def test_groups_that_cannot_be_chosen_are_refused(change: dict[str, int], said: str) -> None:
    config = CONFIG | change
    with pytest.raises(ArchitectureError, match=said):
        architecture_for(config, "x")
