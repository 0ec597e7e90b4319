"""w2 for the inputs that it will be served. Oracle: regression on the tokens themselves, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from quantizers.architectures.gates import plain_gate
from quantizers.formats.packed_integers import dequantize
from quantizers.model.moe_inputs import MoeInputs, capture_moe_inputs
from quantizers.solve import hessians
from quantizers.solve.hessians import DownHessian, collect_down_hessian
from quantizers.solve.rounding import minmax_scales, nearest
from quantizers.solve.routing_weights import routing_statistics
from quantizers.solve.solver import corrected

EXPERTS, HIDDEN, WIDTH = 3, 64, 32
Case = tuple[list[MoeInputs], torch.Tensor, torch.Tensor]


def case(seed: int, lengths: tuple[int, ...] = (30, 60)) -> Case:
    """MoeInputs sequences, the source's w1 and w3, and those rounded to 4 bits."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    sequences = []
    for length in lengths:
        chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:2] for _ in range(length)])
        weight = torch.rand(length, 2, generator=generator)
        sequences.append(capture_moe_inputs(normal(length, HIDDEN), chosen, weight / weight.sum(-1, keepdim=True)))
    source = normal(EXPERTS, 2 * WIDTH, HIDDEN) / 8
    scale = minmax_scales(source, 32, 4)
    return sequences, source, dequantize(nearest(source, scale, 4), scale)


def sums_of(sequences: list[MoeInputs], source: torch.Tensor, served: torch.Tensor, share: float) -> DownHessian:
    found = routing_statistics(sequences, EXPERTS, share, HIDDEN)
    return collect_down_hessian(sequences, found, served, gate=plain_gate(silu), batch=(0, EXPERTS), source=source)


def slow(
    sequences: list[MoeInputs], source: torch.Tensor, served: torch.Tensor, share: float
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each expert d and h of all tokens, their weights in the blend, and the part that is the routed ones'."""
    x, chosen, weight = (
        torch.cat([getattr(r, name) for r in sequences]).double() for name in ("x", "chosen", "weight")
    )

    def hidden(gate_up: torch.Tensor) -> torch.Tensor:
        w1, w3 = gate_up.double().chunk(2)
        return silu(x @ w1.T) * (x @ w3.T)

    result = []
    for e in range(EXPERTS):
        h = hidden(served[e])
        r = torch.where(chosen == e, weight, 0.0).sum(-1)
        full = share * min(1.0, int((chosen == e).sum()) / HIDDEN)
        routed = full * r.square() / r.square().sum()
        result.append((hidden(source[e]) - h, h, routed + (1 - full) / len(x), routed))
    return result


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_sums_are_those_of_the_tokens(share: float) -> None:
    sequences, source, served = case(1)
    sums = sums_of(sequences, source, served, share)
    assert sums.changes is not None
    for e, (d, h, weight, routed) in enumerate(slow(sequences, source, served, share)):
        close(sums.hessian[e], (h * weight[:, None]).T @ h)
        close(sums.changes[e], (d * routed[:, None]).T @ h)


def test_of_many_tokens_every_nth_block_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean stands for all: the sums of the blocks that were read, with their own total weight."""
    monkeypatch.setattr(hessians, "ROUTED_PER_COLUMN", 1)
    sequences, source, served = case(5, (40, 44, 48, 52))  # 122 routed tokens an expert, 32 are enough: every third
    sums = sums_of(sequences, source, served, 0.9)
    assert sums.changes is not None
    everything = slow(sequences, source, served, 0.9)
    read = slice(0, 40), slice(132, 184)
    for e, (*columns, _, routed) in enumerate(everything):
        d, h, part = (torch.cat([rows[place] for place in read]) for rows in (*columns, routed))
        close(sums.changes[e], (d * (part * routed.sum() / part.sum())[:, None]).T @ h)


def test_the_corrected_matrix_is_the_ridge_regression() -> None:
    """min ‖w2 (h + d) − w h‖² + λ ‖w − w2‖², where d counts as zero off the routed tokens: least squares in float64."""
    sequences, source, served = case(3)
    sums = sums_of(sequences, source, served, 0.9)
    assert sums.changes is not None
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=torch.Generator().manual_seed(4))
    found = corrected(down, sums.hessian, sums.changes)
    for e, (d, h, weight, routed) in enumerate(slow(sequences, source, served, 0.9)):
        w2, root = down[e].double(), weight.sqrt()[:, None]
        target = (h + d * (routed / weight)[:, None]) @ w2.T
        ridge = (0.01 * float(((h * root) ** 2).sum(0).mean())) ** 0.5 * torch.eye(WIDTH, dtype=torch.float64)
        inputs, wanted = torch.cat([h * root, ridge]), torch.cat([target * root, ridge @ w2.T])
        solution = torch.linalg.lstsq(inputs, wanted).solution.T
        torch.testing.assert_close(found[e].double(), solution, rtol=2e-3, atol=2e-3)
        before, after = (
            float((((h @ w.double().T - (h + d) @ w2.T) ** 2).sum(-1) * routed).sum()) for w in (down[e], found[e])
        )
        assert after < before


def test_sums_without_a_solution_leave_the_matrix() -> None:
    down = torch.randn(1, 8, 4)
    assert torch.equal(corrected(down, torch.full((1, 4, 4), float("nan")), torch.ones(1, 4, 4)), down)
