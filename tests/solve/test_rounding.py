"""Group scales and codes against compressed-tensors, brute force, and textbook GPTQ in float64."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, quantize
from compressed_tensors.quantization import dequantize as library_dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from hessians import broken_hessians, correlated_hessian
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.formats.packed_integers import SIZES, code_range, dequantize
from quantizers.solve.grid import MSE_FACTORS
from quantizers.solve.rounding import gptq, minmax_scales, mse_scales, nearest

FEW = settings(max_examples=25, deadline=None, database=None, derandomize=True)
bit_widths = pytest.mark.parametrize("bits", [2, 4, 8])


def random_weight(seed: int, *shape: int) -> torch.Tensor:
    """Normal weights whose columns and rows differ in size, as a trained matrix's do."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape[:-1], 1, generator=generator).exp()
    return torch.randn(*shape, generator=generator) * rows * shape[-1] ** -0.5


def library_arguments(bits: int, group: int) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group, scale_dtype=torch.bfloat16
    )


@FEW
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 9),
    groups=st.integers(1, 4),
    group=st.sampled_from([32, 64, 128]),
    bits=st.sampled_from(SIZES),
    exponent=st.integers(-20, 20),
)
def test_minmax_and_nearest_are_compressed_tensors(
    seed: int, rows: int, groups: int, group: int, bits: int, exponent: int
) -> None:
    """Oracle: calculate_qparams, quantize and dequantize with bfloat16 scales. Equal, not close."""
    weight = random_weight(seed, rows, groups * group) * 2.0**exponent
    arguments = library_arguments(bits, group)
    view = weight.unflatten(-1, (-1, group))
    expected, zero = calculate_qparams(view.amin(-1), view.amax(-1), arguments)
    turned = torch.where(view.amax(-1) > -view.amin(-1), -1.0, 1.0)  # the wider side gets the code that the other lacks
    assert torch.equal(minmax_scales(weight, group, bits, signed=False).float(), expected.float())
    scale = minmax_scales(weight, group, bits)
    assert scale.dtype == torch.bfloat16
    assert torch.equal(scale.float(), turned * expected.float())
    codes = nearest(weight, scale, bits)
    assert torch.equal(codes, quantize(weight, scale.float(), zero, arguments, dtype=torch.int8))
    assert torch.equal(dequantize(codes, scale), library_dequantize(codes, scale.float(), None, arguments))


@bit_widths
def test_an_all_zero_group_gets_scale_one_and_codes_zero(bits: int) -> None:
    """For min-max and MSE scales, nearest and GPTQ; the groups beside it are as they would be without it."""
    weight = random_weight(3, 2, 4, 96)
    whole = minmax_scales(weight, 32, bits)
    weight[0, 1, 32:64] = 0
    hessian = correlated_hessian(3, 2, 96, 200)
    best = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), 32, bits)
    scale = minmax_scales(weight, 32, bits)
    assert float(scale[0, 1, 1]) == 1
    assert float(best[0, 1, 1]) == 1
    assert int((scale != whole).sum()) == 1
    for codes in (nearest(weight, scale, bits), gptq(weight, hessian, best, bits)[0]):
        assert torch.isfinite(codes).all()
    assert (nearest(weight, scale, bits)[0, 1, 32:64] == 0).all()
    assert (minmax_scales(torch.zeros(1, 2, 64), 32, bits) == 1).all()


def slow_loss(weight: torch.Tensor, scale: float, importance: torch.Tensor, bits: int) -> float:
    """Σ importance · (w − code · scale)² of one group in float64."""
    low, high = code_range(bits)
    weight, importance = weight.double(), importance.double()
    return float((importance * (weight - (weight / scale).round().clamp(low, high) * scale).square()).sum())


@pytest.mark.on_device
@pytest.mark.parametrize(("bits", "signed"), [(2, True), (4, True), (4, False), (8, True)])
def test_mse_scales_are_the_best_of_brute_force(bits: int, signed: bool, device: torch.device) -> None:
    """Oracle: float64 loss of min-max and of ±1.05, ±1.03 … ±0.67 times it, group by group."""
    assert pytest.approx([1.05 - 0.02 * k for k in range(20)]) == MSE_FACTORS
    weight = random_weight(0, 2, 6, 96)
    importance = correlated_hessian(0, 2, 96, 50).diagonal(dim1=-2, dim2=-1)
    there = weight.to(device)
    base = minmax_scales(there, 32, bits, signed=signed).cpu()
    chosen = mse_scales(there, importance.to(device), 32, bits, signed=signed).cpu()
    assert bool((chosen < 0).any()) == signed
    assert chosen.dtype == torch.bfloat16
    moved = 0
    for e in range(2):
        for r in range(6):
            for n in range(3):
                part, column = weight[e, r, 32 * n : 32 * n + 32], importance[e, 32 * n : 32 * n + 32]
                factors = [1.05 - 0.02 * k for k in range(20)]
                factors = [1.0, *factors, *(-factor for factor in factors if signed)]
                tried = [float((base[e, r, n].float() * f).bfloat16()) for f in factors]
                got = float(chosen[e, r, n])
                assert got in tried
                losses = [slow_loss(part, scale, column, bits) for scale in tried]
                assert slow_loss(part, got, column, bits) <= min(losses) * (1 + 1e-5)
                moved += got != tried[0]
    assert moved > 18  # of 36: the search is not idle


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_mse_scales_without_a_usable_importance_are_minmax(value: float) -> None:
    """Nothing is smaller than nothing: the scale stays where it was."""
    weight = random_weight(5, 2, 4, 64)
    importance = torch.ones(2, 64)
    importance[1] = value
    chosen, base = mse_scales(weight, importance, 32, 4), minmax_scales(weight, 32, 4)
    assert torch.equal(chosen[1], base[1])
    assert torch.equal(chosen[:1], mse_scales(weight[:1], importance[:1], 32, 4))


@pytest.mark.on_device
@bit_widths
def test_gptq_without_a_usable_hessian_rounds_to_nearest(bits: int, device: torch.device) -> None:
    """Damping infinity and nearest codes for the broken ones; the healthy one is as it is alone."""
    weight, hessians = random_weight(8, 6, 5, 64).to(device), broken_hessians(64).to(device)
    scale = minmax_scales(weight, 32, bits)
    codes, used = gptq(weight, hessians, scale, bits)
    assert torch.isinf(used[:5]).all()
    assert float(used[5]) == pytest.approx(0.01)
    assert torch.equal(codes[:5], nearest(weight[:5], scale[:5], bits))
    alone, _ = gptq(weight[5:], hessians[5:], scale[5:], bits)
    assert torch.equal(codes[5:], alone)
    assert not torch.equal(codes[5:], nearest(weight[5:], scale[5:], bits))


def loss(weight: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """tr(D H Dᵀ) per expert in float64."""
    delta = dequantize(codes, scale).double() - weight.double()
    return (delta @ hessian.double() * delta).sum((-1, -2))


def textbook_gptq(
    weight: torch.Tensor, hessian: torch.Tensor, scale: torch.Tensor, bits: int, damping: float = 0.01
) -> torch.Tensor:
    """One expert's codes in float64, as the paper derives the method, without Cholesky factors or blocks.

    Columns by falling diagonal. Round one, add its error times inverse(H)[j, rest] / inverse(H)[j, j] to
    the rest, and remove row and column j from inverse(H) by one step of Gaussian elimination.
    """
    weight, hessian = weight.double().clone(), hessian.double()
    low, high = code_range(bits)
    group = weight.shape[1] // scale.shape[1]
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(hessian.shape[0], dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    codes = torch.zeros_like(weight)
    left = sorted(range(weight.shape[1]), key=lambda j: -float(hessian[j, j]))
    while left:
        j = left.pop(0)
        step = scale[:, j // group].double()
        codes[:, j] = (weight[:, j] / step).round().clamp(low, high)
        error = (weight[:, j] - codes[:, j] * step) / inverse[j, j]
        weight -= error.unsqueeze(1) * inverse[j].unsqueeze(0)
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@bit_widths
@pytest.mark.parametrize(("columns", "group", "tokens"), [(32, 32, 300), (96, 32, 40), (320, 64, 900)])
def test_gptq_is_the_textbooks(columns: int, group: int, tokens: int, bits: int) -> None:
    """Oracle: `textbook_gptq`. A float32 tie that falls the other way changes the rest of its row: few rows may."""
    rows = 24
    weight, hessian = random_weight(columns, 2, rows, columns), correlated_hessian(columns, 2, columns, tokens)
    scale = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), group, bits)
    codes, _ = gptq(weight, hessian, scale, bits)
    expected = torch.stack([textbook_gptq(weight[e], hessian[e], scale[e], bits) for e in range(2)]).float()
    different = (codes != expected).any(-1)
    assert int(different.sum()) <= 2 * rows * (0.05 if bits == 4 else 0.15), f"{int(different.sum())} rows"
    torch.testing.assert_close(
        loss(weight, codes, scale, hessian), loss(weight, expected, scale, hessian), rtol=0.01, atol=0
    )
