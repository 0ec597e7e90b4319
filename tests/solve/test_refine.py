"""The sweep after GPTQ: never a larger loss, and each step the best there is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.formats.packed_integers import code_range, dequantize
from quantizers.solve.damping import damped
from quantizers.solve.rounding import gptq, mse_scales, nearest, refine


def case(experts: int, rows: int, groups: int, bits: int, seed: int, signed: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    columns = 32 * groups
    x = torch.randn(experts, 3 * columns, columns, generator=generator)
    x = x @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator) / columns**0.5 * 4)
    weight = torch.randn(experts, rows, columns, generator=generator)
    hessian = damped(x.mT @ x, torch.full((experts,), 0.01))
    scale = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), 32, bits, signed=signed)
    return weight, hessian, gptq(weight, hessian, scale, bits)[0], scale


def loss(weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(E, R) float64, by the definition."""
    delta = (weight - dequantize(codes, scale)).double()
    return ((delta @ hessian.double()) * delta).sum(-1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_no_row_gets_worse_and_codes_and_scales_stay_valid(
    experts: int, rows: int, groups: int, bits: int, signed: bool, seed: int
) -> None:
    weight, hessian, codes, scale = case(experts, rows, groups, bits, seed, signed)
    finer, finer_scale = refine(weight, hessian, codes, scale, bits, signed=signed)
    before, after = loss(weight, hessian, codes, scale), loss(weight, hessian, finer, finer_scale)
    assert bool((after <= before * (1 + 1e-5) + 1e-9).all())
    low, high = code_range(bits)
    assert finer.dtype == torch.int8
    assert low <= int(finer.min())
    assert int(finer.max()) <= high
    assert finer_scale.dtype == torch.bfloat16
    assert bool((finer_scale != 0).all() if signed else (finer_scale > 0).all())


def test_a_slow_version_in_float64_makes_the_same_choices() -> None:
    """The same sweep written out for one row at a time, the loss evaluated afresh for every choice."""
    weight, hessian, codes, scale = case(1, 3, 2, 4, 11)
    finer, finer_scale = refine(weight, hessian, codes, scale, 4)
    for row in range(3):
        w, g = weight[0, row].double(), hessian[0].double()
        q, s = codes[0, row].double().clone(), scale[0, row].double().clone()

        def value(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor = w, g: torch.Tensor = g) -> float:
            delta = w - q * s.repeat_interleave(32)
            return float(delta @ g @ delta)

        for group in range(2):
            part = slice(32 * group, 32 * group + 32)
            direction = torch.zeros_like(q)
            direction[part] = q[part]
            slope = direction @ g @ (w - q * s.repeat_interleave(32))
            wanted = s.clone()
            wanted[group] = (s[group] + slope / (direction @ g @ direction)).bfloat16().double()
            if value(q, wanted) < value(q, s):
                s = wanted
            for column in range(part.start, part.stop):
                tried = [q.clone() for _ in range(16)]
                for code, candidate in zip(range(-8, 8), tried, strict=True):
                    candidate[column] = code
                q = min(tried, key=lambda candidate, s=s: value(candidate, s))
        assert torch.equal(finer_scale[0, row].double(), s)
        assert torch.equal(finer[0, row].double(), q)


def test_weights_on_the_grid_stay_as_they_are() -> None:
    codes = torch.randint(-8, 8, (1, 4, 64), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale = torch.full((1, 4, 2), 0.25, dtype=torch.bfloat16)
    weight = dequantize(codes, scale)
    hessian = torch.eye(64).unsqueeze(0)
    assert torch.equal(nearest(weight, scale, 4), codes)
    finer, finer_scale = refine(weight, hessian, codes, scale, 4)
    assert torch.equal(finer, codes)
    assert torch.equal(finer_scale, scale)


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_damping_that_means_nothing_leaves_a_positive_diagonal(value: float) -> None:
    hessian = torch.zeros(1, 4, 4)
    assert bool((damped(hessian, torch.tensor([value])).diagonal(dim1=-2, dim2=-1) > 0).all())
