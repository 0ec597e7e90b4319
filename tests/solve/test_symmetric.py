"""Half of a symmetric product against the whole of it in float64, and a clock that only counts when heard."""

from __future__ import annotations

import itertools

import pytest
import torch
from clock import Clock, listening

from quantizers.device.timing import phase
from quantizers.solve.symmetric import add_hessian, blocks, mirror, row_losses

CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [1, 32, 127, 128, 129, 256, 500, 1024, 1100])
def test_blocks_cover_every_column_once(columns: int) -> None:
    parts = list(blocks(columns))
    assert parts[0][0] == 0
    assert parts[-1][1] == columns
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert len(parts) <= 8


@pytest.mark.on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 128, 200, 300])
def test_sums_of_outer_products(columns: int, dtype: torch.dtype, device: torch.device) -> None:
    """Oracle: Σ v vᵀ in float64 of the same values; exactly symmetric; two sequences add up."""
    generator = torch.Generator().manual_seed(columns)
    total, wanted = (
        torch.zeros(2, columns, columns, device=device),
        torch.zeros(2, columns, columns, dtype=torch.float64),
    )
    for tokens in (50, 7):
        v = torch.randn(2, tokens, columns, generator=generator).to(dtype)
        add_hessian(total, v.to(device))
        wanted += v.double().mT @ v.double()
    mirror(total)
    total = total.cpu()
    assert total.dtype == torch.float32
    assert torch.equal(total, total.mT)
    length = wanted.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((total.double() - wanted).abs() <= 1e-6 * length.unsqueeze(-1) * length.unsqueeze(-2)).all()


@pytest.mark.on_device
@pytest.mark.parametrize("columns", [8, 128, 200, 300])
def test_the_loss_is_that_of_all_inputs(columns: int, device: torch.device) -> None:
    """Oracle: ‖D X‖² in float64, with a Hessian for each and one for all; arguments left alone."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(3, 40, columns, generator=generator, dtype=torch.float64)
    delta = torch.randn(3, 5, columns, generator=generator, dtype=torch.float64)
    hessian = x.mT @ x
    there = delta.to(device, copy=True), hessian.to(device, copy=True)
    own, shared = row_losses(*there).cpu(), row_losses(there[0], there[1][:1]).cpu()
    torch.testing.assert_close(own, (delta @ x.mT).square().sum(2), rtol=1e-12, atol=0)
    torch.testing.assert_close(shared, (delta @ x[:1].mT).square().sum(2), rtol=1e-12, atol=0)
    assert torch.equal(delta, there[0].cpu())
    assert torch.equal(hessian, there[1].cpu())


def test_a_clock_counts_blocks_while_it_listens() -> None:
    with phase("unheard"):
        pass
    with listening(Clock(CPU)) as clock:
        for _ in range(2):
            with phase("a"):
                pass
        with phase("b"):
            pass
    with phase("unheard"):
        pass
    assert list(clock.seconds()) == ["a", "b"]
    assert all(seconds >= 0 for seconds in clock.seconds().values())
