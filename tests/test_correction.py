"""w2 for the inputs that it will be served. Oracle: regression on the tokens themselves, in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from quantizers.correction import corrected, served_sums
from quantizers.rounding import dequantize, minmax_scales, nearest
from quantizers.statistics import Recorded, blend

EXPERTS, HIDDEN, WIDTH, TOKENS = 3, 64, 32, 90


def case(seed: int) -> tuple[list[Recorded], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sequences = []
    for length in (TOKENS // 3, TOKENS - TOKENS // 3):
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(length)])
        weight = torch.rand(length, 2, generator=generator)
        sequences.append(Recorded(normal(length, HIDDEN), chosen, weight / weight.sum(-1, keepdim=True)))
    gate_up, smooth = normal(EXPERTS, 2 * WIDTH, HIDDEN) / 8, torch.exp(0.3 * normal(HIDDEN))
    s = torch.exp(0.3 * normal(EXPERTS, WIDTH))
    scaled = gate_up * smooth
    scaled[:, WIDTH:] /= s.unsqueeze(-1)
    scale = minmax_scales(scaled, 32, 4)
    return sequences, gate_up, dequantize(nearest(scaled, scale, 4), scale), smooth, s


def slow(
    sequences: list[Recorded],
    gate_up: torch.Tensor,
    served: torch.Tensor,
    smooth: torch.Tensor,
    s: torch.Tensor,
    share: float,
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each expert h / s, h' and the tokens' weights, all in float64."""
    x, chosen, weight = (
        torch.cat([getattr(r, name) for r in sequences]).double() for name in ("x", "chosen", "weight")
    )
    result = []
    for e in range(EXPERTS):
        w1, w3 = gate_up[e].double().chunk(2)
        h = silu(x @ w1.T) * (x @ w3.T) / s[e].double()
        w1, w3 = served[e].double().chunk(2)
        h_served = silu(x / smooth @ w1.T) * (x / smooth @ w3.T)
        r = torch.where(chosen == e, weight, 0.0).sum(-1)
        full = share * min(1.0, int((chosen == e).sum()) / HIDDEN)
        result.append((h, h_served, full * r.square() / r.square().sum() + (1 - full) / len(x)))
    return result


def test_the_sums_are_those_of_the_tokens() -> None:
    sequences, gate_up, served, smooth, s = case(1)
    blended = blend(sequences, EXPERTS, 0.9, HIDDEN)
    total, cross = served_sums(sequences, gate_up, served, smooth, s, silu, blended, 0)
    for e, (h, h_served, weight) in enumerate(slow(sequences, gate_up, served, smooth, s, 0.9)):
        wanted = (h_served * weight[:, None]).T @ h_served
        torch.testing.assert_close(total[e].double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))
        wanted = (h * weight[:, None]).T @ h_served
        torch.testing.assert_close(cross[e].double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_one_chunk_or_several_is_the_same() -> None:
    sequences, gate_up, served, smooth, s = case(2)
    blended = blend(sequences, EXPERTS, 0.9, HIDDEN)
    whole = served_sums(sequences, gate_up, served, smooth, s, silu, blended, 0)
    for e in range(EXPERTS):
        part = slice(e, e + 1)
        one = served_sums(sequences, gate_up[part], served[part], smooth, s[part], silu, blended, e)
        assert torch.equal(one[0][0], whole[0][e])
        assert torch.equal(one[1][0], whole[1][e])


def test_the_corrected_matrix_is_the_ridge_regression() -> None:
    """min ‖w2 h − w h'‖² + d ‖w − w2‖², solved as least squares on the stacked tokens in float64."""
    sequences, gate_up, served, smooth, s = case(3)
    blended = blend(sequences, EXPERTS, 0.9, HIDDEN)
    total, cross = served_sums(sequences, gate_up, served, smooth, s, silu, blended, 0)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=torch.Generator().manual_seed(4))
    found = corrected(down, total, cross, 0.01)
    for e, (h, h_served, weight) in enumerate(slow(sequences, gate_up, served, smooth, s, 0.9)):
        root, target = weight.sqrt()[:, None], h @ down[e].double().T
        d = 0.01 * float(((h_served * root) ** 2).sum(0).mean())
        inputs = torch.cat([h_served * root, d**0.5 * torch.eye(WIDTH, dtype=torch.float64)])
        wanted = torch.linalg.lstsq(inputs, torch.cat([target * root, d**0.5 * down[e].double().T])).solution.T
        torch.testing.assert_close(found[e].double(), wanted, rtol=2e-3, atol=2e-3)
        before, after = (
            float((((h_served @ w.double().T - target) ** 2).sum(-1) * weight).sum()) for w in (down[e], found[e])
        )
        assert after < before


def test_nothing_to_correct_changes_nothing() -> None:
    down = torch.randn(2, 8, 4)
    total = torch.eye(4).expand(2, 4, 4) * 3.0
    assert torch.equal(corrected(down, total, total, 0.01), down)


def test_sums_without_a_solution_leave_the_matrix() -> None:
    down = torch.randn(1, 8, 4)
    assert torch.equal(corrected(down, torch.full((1, 4, 4), float("nan")), torch.zeros(1, 4, 4), 0.01), down)
