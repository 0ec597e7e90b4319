"""Rounding to NVFP4's grid: compressed-tensors' own casts, and slow versions of scales and rounding, as oracles."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization.quant_args import FP4_E2M1_DATA
from hessians import correlated_hessian

from quantizers.formats import nvfp4
from quantizers.formats.nvfp4 import E2M1
from quantizers.formats.packed_integers import dequantize
from quantizers.solve.awq import scale_losses
from quantizers.solve.damping import damped
from quantizers.solve.grid import ABOVE, BELOW, stored_scale, unit
from quantizers.solve.rounding import gptq, minmax_scales, mse_scales, nearest, refine

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = torch.cat([VALUES, -VALUES]) * 2
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # every positive number


def random_weight(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.randn(*shape[:-1], 1, generator=generator).exp()


def loss(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """tr(D H Dᵀ) per expert in float64."""
    delta = dequantize(codes, scale).double() - weight.double()
    return (delta @ hessian.double() * delta).sum((-1, -2))


def on_grid(seed: int, experts: int = 2, rows: int = 12, columns: int = 64) -> torch.Tensor:
    """Weights of which some groups are small, in units of the global scale."""
    weight = random_weight(seed, experts, rows, columns)
    weight[:, ::3, :16] *= 0.01
    scale = unit(weight, E2M1)
    assert scale is not None
    return weight * scale[:, None, None]


def is_stored(scale: torch.Tensor) -> bool:
    return bool(torch.isin(2 * scale.float(), E4M3).all())


def test_codes_are_those_of_compressed_tensors() -> None:
    """Ties too: between two numbers, the one with the even code."""
    x = torch.cat([torch.linspace(-8, 8, 4001), (VALUES[1:] + VALUES[:-1]) / 2, -(VALUES[1:] + VALUES[:-1]) / 2])
    assert torch.equal(nvfp4.nearest_e2m1_(x.clone()), FP4_E2M1_DATA.cast_to_fp4(x))
    codes = nearest(on_grid(1), minmax_scales(on_grid(1), 16, E2M1), E2M1)
    assert torch.isin(codes.float(), CODES).all()
    assert nvfp4.pack(codes).dtype == torch.uint8
    assert torch.equal(nvfp4.unpack(nvfp4.pack(codes)[0]), codes[0] / 2)


def test_scales_are_e4m3_numbers_and_never_zero() -> None:
    weight = on_grid(2)
    weight[0, 0] = 0
    weight[1, 1, :16] = 1e-9
    for scale in (minmax_scales(weight, 16, E2M1), mse_scales(weight, torch.ones(2, 64), 16, E2M1)):
        assert is_stored(scale)
    assert is_stored(stored_scale(torch.tensor([0.0, 1e9, -3.0, 0.7]), E2M1))
    largest = weight.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
    assert torch.equal(2 * minmax_scales(weight, 16, E2M1).float()[:, 2], largest.to(torch.float8_e4m3fn).float()[:, 2])
    assert nvfp4.global_scale(torch.tensor([2688.0, 0.0])).tolist() == [1, 1]


def test_a_groups_scale_is_the_best_of_the_e4m3_numbers_around_the_minmax_one() -> None:
    """By brute force, in float64; and of all 126 none would gain much."""
    weight, importance = on_grid(3), torch.rand(2, 64, generator=torch.Generator().manual_seed(4)) + 0.1
    groups, column = weight.unflatten(-1, (-1, 16)).double(), importance.unflatten(-1, (-1, 16))[:, None].double()

    def lost(scale: torch.Tensor) -> torch.Tensor:  # (E, R, n), twice the grid's
        codes = FP4_E2M1_DATA.cast_to_fp4(groups / scale.unsqueeze(-1))
        return ((codes * scale.unsqueeze(-1) - groups).square() * column).sum(-1)

    chosen = 2 * mse_scales(weight, importance, 16, E2M1).double()
    every = torch.stack([lost(torch.full_like(chosen, float(scale))) for scale in E4M3])
    base = torch.searchsorted(E4M3.double(), 2 * minmax_scales(weight, 16, E2M1).double())
    near = (base + torch.arange(-BELOW, ABOVE + 1)[:, None, None, None]).clamp(0, len(E4M3) - 1)
    assert torch.allclose(lost(chosen), every.gather(0, near).amin(0), rtol=1e-5)
    assert float(lost(chosen).sum() / every.amin(0).sum()) < 1.05


def test_gptq_is_the_textbooks_and_refining_it_helps() -> None:
    """Oracle: one column at a time, with the inverse Hessian's own rows, in float64."""
    weight, hessian = on_grid(5), correlated_hessian(5, 2, 64, 400)
    scale = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), 16, E2M1)
    codes, used = gptq(weight, hessian, scale, E2M1)
    different = 0
    for expert in range(2):
        rest, own = weight[expert].double().clone(), hessian[expert].double()
        inverse = torch.linalg.inv(own + 0.01 * own.diagonal().mean() * torch.eye(64, dtype=torch.float64))
        left = sorted(range(64), key=lambda j, own=own: -float(own[j, j]))
        expected = torch.zeros_like(rest)
        while left:
            j = left.pop(0)
            step = scale[expert, :, j // 16].double()
            expected[:, j] = 2 * FP4_E2M1_DATA.cast_to_fp4(rest[:, j] / step / 2)
            rest -= torch.outer((rest[:, j] - expected[:, j] * step) / inverse[j, j], inverse[j])
            inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        different += int((codes[expert] != expected).any(-1).sum())
    assert different <= 2
    finer, finer_scale = refine(weight, damped(hessian, used), codes, scale, E2M1, sweeps=2)
    assert torch.isin(finer.float(), CODES).all()
    assert is_stored(finer_scale)
    plain = loss(weight, nearest(weight, scale, E2M1), scale, hessian)
    assert bool((loss(weight, finer, finer_scale, hessian) < loss(weight, codes, scale, hessian)).all())
    assert bool((loss(weight, codes, scale, hessian) < 0.8 * plain).all())


@pytest.mark.parametrize("shared", [True, False])
def test_the_search_rounds_as_it_is_stored(shared: bool) -> None:
    """Each candidate's loss, from the scaled weights' own global scale and E4M3 group scales."""
    weight, hessian = random_weight(6, 3, 8, 64), correlated_hessian(6, 1 if shared else 3, 64, 200)
    grid = torch.rand(4, len(hessian), 64, generator=torch.Generator().manual_seed(7)) * 3 + 0.2
    found = scale_losses(weight, hessian, grid, 16, E2M1)
    for point, s in enumerate(grid):
        for expert in range(3):
            scaled = weight[expert] * s[0 if shared else expert]
            whole = 2688 / scaled.abs().max()
            group = (scaled * whole).unflatten(-1, (-1, 16))
            scale = (group.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
            rounded = (FP4_E2M1_DATA.cast_to_fp4(group / scale) * scale / whole).flatten(-2)
            lost = (rounded / s[0 if shared else expert] - weight[expert]).double()
            wanted = (lost @ hessian[0 if shared else expert].double() * lost).sum()
            assert float(found[point, expert]) == pytest.approx(float(wanted), rel=1e-3)
