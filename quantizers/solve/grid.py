"""The grid that weights are rounded to: symmetric integers with bfloat16 scales, or NVFP4's E2M1 with E4M3 scales.

A code is what a group's scale is multiplied by, an int8. Those of E2M1 are twice its values, and its scales half of
those that are stored, so that they are whole numbers. NVFP4's second scale, float32, of a whole matrix, is the divisor
`global_scale`: weights are multiplied by it beforehand, so that a group's scale alone is left to find.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantizers.formats.format import Grid
from quantizers.formats.nvfp4 import E2M1, global_scale, nearest_e2m1_, nearest_e4m3
from quantizers.formats.packed_integers import code_range

LARGEST = 12.0  # of E2M1's codes
# Multiples of the min-max scale that are tried for integers; for E2M1 so many E4M3 numbers below and above it: with
# half as much again, the largest weight is 4 instead of 6.
MSE_COUNT = 20
MSE_FIRST = 1.05
MSE_LESS = 0.02  # from each to the next
MSE_FACTORS = tuple(MSE_FIRST - MSE_LESS * k for k in range(MSE_COUNT))
BELOW, ABOVE = 6, 5


def reach(grid: Grid) -> float:
    """Largest weight that a group may have, in units of its scale: half of the range of integers, or the last code."""
    if grid == E2M1:
        return LARGEST
    low, high = code_range(grid)
    return (high - low) / 2


def nearest_code_(x: Tensor, grid: Grid) -> Tensor:
    """Round weights, divided by their scale, to codes, in place."""
    if grid != E2M1:
        return x.round_().clamp_(*code_range(grid))
    return nearest_e2m1_(x.div_(2)).mul_(2)


def stored_scale(scale: Tensor, grid: Grid) -> Tensor:
    """The bfloat16 scale nearest to a float32 one that a file can hold; of E2M1 never zero."""
    return scale.bfloat16() if grid != E2M1 else nearest_e4m3(2 * scale).bfloat16().div_(2)


def scale_candidates(base: Tensor, grid: Grid, signed: bool) -> Iterator[Tensor]:
    """Yield the scales to try besides the min-max scale `base`, bfloat16 each."""
    if grid == E2M1:
        number = nearest_e4m3(2 * base.float()).view(torch.uint8).short()
        for place in range(-BELOW, ABOVE + 1):
            yield (number + place).clamp_(1, 126).to(torch.uint8).view(torch.float8_e4m3fn).bfloat16().div_(2)
        return
    exact = base.float()
    for factor in (*MSE_FACTORS, *(-factor for factor in MSE_FACTORS if signed)):
        yield (exact * factor).bfloat16()


def unit(weight: Tensor, grid: Grid) -> Tensor | None:
    """Global scale by which each matrix of (E, R, C) is multiplied on its grid, (E,) float32; None for integers."""
    return global_scale(torch.linalg.vector_norm(weight, torch.inf, dim=(-2, -1))) if grid == E2M1 else None
