"""Launches of the Triton kernels in triton_code.py for the inner loops of the solver.

Each has an eager twin, which says in torch's operations what is computed, and computes it without the kernel:
`round_block`, `refine_group` and `mse_steps` in rounding.py, and `weigh_rows` in hessians.py. A kernel gives its twin's
bits, by a rule that both keep:

    every operation rounds by itself: a product and the sum after it are two roundings, never one
    division is IEEE's
    sums have a written order: from left to right, or as in symmetric.py

So neither block sizes nor the number of warps nor the model of GPU decide a bit. Matrix products stay with the
libraries in both. kernel_check.py compares each with its twin at the start of a run.

Every tensor may be a view, as long as rows are contiguous.

Legend: E experts, C columns, W columns of a block, R rows, g group size, n = C / g groups; c experts of a batch,
I expert width, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quantizers.device import triton_support
from quantizers.formats.packed_integers import code_range

from .symmetric import LANES

ROWS, WIDE = 32, 64  # rows of a program, and columns from which on there are fewer, for want of registers
INTERPRETED = 1024  # rows of a program in Triton's interpreter, where every operation takes as long
MSE_COUNT, MSE_FIRST, MSE_LESS = 20, 1.05, 0.02  # multiples of the min-max scale: so many, the first, the steps down
STRIP, SUMS = 16, 128  # of a program that weighs rows: columns, and tokens of theirs that are added apart


def rows_of_program(columns: int) -> int:
    """Rows of a program on a GPU that has so many columns in registers."""
    return ROWS if columns <= WIDE else ROWS * WIDE // columns


def _launch(
    kernel: str, tensors: Sequence[torch.Tensor], *strides: int, bits: int, columns: int, groups: int = 1, **sizes: Any
) -> None:
    """Launch a kernel: a program for some rows of each expert of its last tensor (E, …, R), and each of its groups.

    Its arguments are the tensors, R, the steps in memory from one expert of each to the next, and other strides.
    """
    from . import triton_code

    on, (low, high) = tensors[-1], code_range(bits)
    rows = rows_of_program(columns) if on.is_cuda else INTERPRETED
    grid = (on.shape[0], -(-on.shape[-1] // rows), groups)
    steps = [tensor.stride(0) for tensor in tensors]
    triton_support.launch(
        getattr(triton_code, kernel), grid, on, *tensors, on.shape[-1], *steps, *strides, LOW=low, HIGH=high, ROWS=rows,
        **sizes,
    )  # fmt: skip


def gptq_block(
    work: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    group_of: torch.Tensor,
    errors: torch.Tensor,
    codes: torch.Tensor,
    bits: int,
) -> None:
    """Round the columns of a block one by one, each less its share of the errors before it.

    Args:
        work: (E, W, R) float32, the columns less the errors spread to them so far.
        factor: (E, W, W) float32, an error's (row) share in each later column.
        scale: (E, n, R) bfloat16, of all groups.
        group_of: (E, W) int32, the group of each column.
        errors: (E, W, R) float32, filled.
        codes: (E, W, R) int8, filled.
    """
    width, tensors = work.shape[1], (work, factor, scale, group_of, errors, codes)
    _launch("gptq_block", tensors, factor.stride(1), factor.stride(2), bits=bits, columns=width, W=width)


def refine_group(
    block: torch.Tensor,
    scale: torch.Tensor,
    near: torch.Tensor,
    image: torch.Tensor,
    codes: torch.Tensor,
    change: torch.Tensor,
    bits: int,
    signed: bool,
) -> None:
    """Set a group's scale, and then its codes one by one, each to the best given all others.

    Args:
        block: (E, g, g) float32, the group's own part of the Hessian H.
        scale: (E, R) bfloat16, set.
        near: (E, g, R) float32, the group's columns of Pᵀ, see rounding.py. Worthless afterwards.
        image: (E, g, R) float32, block @ codes. Worthless afterwards.
        codes: (E, g, R) int8, set.
        change: (E, g, R) float32, filled: Ŵᵀ before less Ŵᵀ after.
        signed: whether the scale may be negative.
    """
    group, tensors = codes.shape[1], (block, scale, near, image, codes, change)
    _launch("refine_group", tensors, block.stride(1), bits=bits, columns=group, G=group, SIGNED=signed)


def mse_scales(weight: torch.Tensor, importance: torch.Tensor, chosen: torch.Tensor, bits: int, signed: bool) -> None:
    """Choose the best of each group's min-max scale and some multiples of it.

    Args:
        weight: (E, C, R) float32, transposed.
        importance: (E, C) float32, what a squared error in each column counts.
        chosen: (E, n, R) bfloat16, filled.
        signed: whether a scale may be negative.
    """
    groups, tensors = chosen.shape[1], (weight, importance, chosen)
    multiples = {"COUNT": MSE_COUNT, "FIRST": MSE_FIRST, "LESS": MSE_LESS, "SIGNED": signed}
    _launch("mse_scales", tensors, bits=bits, columns=LANES, groups=groups, G=weight.shape[1] // groups, **multiples)


def weigh_rows(rows: torch.Tensor, root: torch.Tensor, magnitude: torch.Tensor) -> None:
    """rows *= root, rounded to bfloat16, zero where root is; and magnitude += |rows| · root.

    Args:
        rows: (c, I, T) bfloat16, each expert's in one piece.
        root: (c, T) bfloat16, not negative.
        magnitude: (c, I, SUMS) float32: each is the sum of every SUMS-th token's, from left to right.
    """
    from . import triton_code

    experts, width, tokens = rows.shape
    triton_support.launch(
        triton_code.weigh_rows, (experts, -(-width // STRIP)), rows,
        rows, root, magnitude, width, tokens, rows.stride(0), root.stride(0), magnitude.stride(0),
        STRIP=STRIP, SUMS=SUMS, num_warps=4,
    )  # fmt: skip
