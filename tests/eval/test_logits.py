"""Logits in float32, whatever dtype the forward pass has: figures in bfloat16 against float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantizers.eval.fidelity import scoring
from quantizers.eval.fidelity.scoring import score_text

POSITIONS, HIDDEN, WORDS = 300, 256, 2000
Model = tuple[torch.Tensor, torch.Tensor]  # states after the final norm (T, H), head (V, H)


@pytest.fixture(scope="module")
def source() -> Model:
    """Random logits up to some 42, from numbers that bfloat16 holds."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(POSITIONS, HIDDEN, generator=generator)
    head = torch.randn(WORDS, HIDDEN, generator=generator) * 8.7 / HIDDEN**0.5
    return states.bfloat16(), head.bfloat16()


@pytest.fixture(scope="module")
def candidate(source: Model) -> Model:
    """The source but for its states, which are off by so much that KL is some 2e-4."""
    states, head = source
    generator = torch.Generator().manual_seed(1)
    return (states.float() + torch.randn(states.shape, generator=generator) * 4e-3).bfloat16(), head


def kl(source: Model, candidate: Model, way: Callable[..., torch.Tensor]) -> torch.Tensor:
    """(T,) float64: KL(source || candidate), logits (T, V) as `way` makes them of states and head."""
    p, q = (torch.log_softmax(way(*model).double(), dim=-1) for model in (source, candidate))
    return (p.exp() * (p - q)).sum(-1)


def exact(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return states.double() @ head.double().T


def rounded(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The way that had the hole: the product itself comes out in bfloat16."""
    return (states @ head.T).float()


def test_the_case_is_one_that_rounded_logits_get_wrong(source: Model, candidate: Model) -> None:
    assert 40 < float(exact(*source).abs().max()) < 50
    truth = float(kl(source, candidate, exact).mean())
    assert 1.5e-4 < truth < 3e-4
    assert float(kl(source, candidate, rounded).mean()) > 2.5 * truth


@pytest.mark.on_device
def test_kl_of_the_evaluation_in_bfloat16(source: Model, candidate: Model, device: torch.device) -> None:
    """Both ways against float64 on the same numbers, position by position; of a model against itself exactly 0."""
    model: Any = SimpleNamespace(device=device, final=lambda rows: rows, logits=lambda products: products)
    tokens = torch.arange(POSITIONS) % WORDS
    states, heads = zip(*(source, candidate, source), strict=True)
    models = [(model, head.to(device)) for head in heads]
    found = score_text(models, tokens, [rows.to(device) for rows in states])
    wanted, reverse = (kl(*pair, exact)[:-1].numpy() for pair in ((source, candidate), (candidate, source)))
    print(f"KL {found[1, 1].mean():.6f}, in float64 {wanted.mean():.6f}")
    assert found[1, 1].mean() == pytest.approx(wanted.mean(), rel=0.01)
    assert np.abs(found[1, 1] - wanted).max() < 2e-5
    assert found[1, 2].mean() == pytest.approx(reverse.mean(), rel=0.01)
    assert np.abs(found[1, 2] - reverse).max() < 2e-5
    log = torch.log_softmax(exact(*candidate), dim=-1)[:-1]
    assert found[1, 0] == pytest.approx(-log.gather(1, tokens[1:, None])[:, 0].numpy(), abs=1e-4)
    assert not found[2, 1:3].any()
    assert found[2, 3].all()


@pytest.mark.parametrize("words", [1, 7, 29, 30, 31])
def test_parts_that_do_not_divide_the_vocabulary(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All words, in their order."""
    monkeypatch.setattr(scoring, "HEAD_ROWS", words)
    generator = torch.Generator().manual_seed(2)
    states, head = (torch.randn(n, 16, generator=generator).bfloat16() for n in (5, 30))
    found = scoring.products(states, head)
    assert found.dtype == torch.float32
    assert float((found.double() - exact(states, head)).abs().max()) < 1e-5
