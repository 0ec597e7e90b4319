"""GPTQ's factor against inverses in float64; and matrices that have none."""

from __future__ import annotations

import pytest
import torch
from hessians import correlated_hessian

from quantizers.solve.rounding import cholesky_inverse


@pytest.mark.on_device
@pytest.mark.parametrize("columns", [1, 32, 160, 170])
@pytest.mark.parametrize("tokens", [20, 500])
def test_inverse_factor_against_float64(columns: int, tokens: int, device: torch.device) -> None:
    """Oracle: inverse(H) in float64, H with 1 % of the mean diagonal added; singular Hessians included."""
    hessian = correlated_hessian(6, 2, max(columns, 5), tokens)[:, :columns, :columns]
    factor, used = (found.cpu() for found in cholesky_inverse(hessian.to(device)))
    assert used.tolist() == pytest.approx([0.01, 0.01])
    assert torch.equal(factor, factor.triu())
    assert (factor.diagonal(dim1=-2, dim2=-1) > 0).all()
    damped = hessian.double().clone()
    for expert in range(2):
        mean = float(damped[expert].diagonal().mean())
        damped[expert].diagonal().add_(0.01 * mean)
    inverse = torch.linalg.inv(damped)
    product = factor.double().mT @ factor.double()
    scale = inverse.diagonal(dim1=-2, dim2=-1).sqrt()
    worst = ((product - inverse).abs() / (scale.unsqueeze(-1) * scale.unsqueeze(-2))).max()
    assert float(worst) < 5e-4


@pytest.mark.parametrize(("lowest", "expected"), [(-0.001, 0.01), (-0.05, 0.1), (-0.5, 1.0), (-5.0, 10.0)])
def test_damping_is_raised_tenfold_until_the_matrix_is_positive(lowest: float, expected: float) -> None:
    """A matrix with one negative eigenvalue of known size; the healthy expert beside it keeps its damping."""
    size = 16
    basis = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(7)))[0]
    # The mean of the diagonal is the mean eigenvalue: 1 when the others make up for the lowest.
    values = torch.full((size,), (size - lowest) / (size - 1))
    values[0] = lowest
    hessian = torch.stack([basis @ torch.diag(values) @ basis.mT, torch.eye(size)])
    factor, used = cholesky_inverse(hessian)
    assert used.tolist() == pytest.approx([expected, 0.01])
    damped = hessian[0].double() + expected * torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(
        factor[0].double().mT @ factor[0].double() @ damped, torch.eye(size).double(), rtol=0, atol=1e-3
    )
