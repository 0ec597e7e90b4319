"""Launches of the Triton kernels in triton_code.py for the inner loops of the solver; see docs/explanation/gpu.md.

Each has an eager twin, which computes the same in torch's operations: the rest of `round_block`, `refine_group` and
`mse_scales` in rounding.py, and `hessians.weigh_rows`. A kernel gives its twin's bits, by a rule that both keep:

    every operation rounds by itself: a product and the sum after it are two roundings, never one
    division is IEEE's
    sums have a written order: from left to right, or as in symmetric.py

So neither block sizes nor the number of warps nor the model of GPU decide a bit. Matrix products stay with the
libraries in both. Every tensor may be a view, as long as rows are contiguous.

Legend: E experts, R rows, c experts of a batch, I expert width, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quantizers.device import triton_support
from quantizers.formats.packed_integers import code_range

ROWS, WIDE = 32, 64  # rows of a program, and columns from which on there are fewer, for want of registers
INTERPRETED = 1024  # rows of a program in Triton's interpreter, where every operation takes as long
STRIP, SUMS = 16, 128  # of a program that weighs rows: columns, and tokens of theirs that are added apart


def rows_of_program(columns: int) -> int:
    """Rows of a program on a GPU that has so many columns in registers."""
    return ROWS if columns <= WIDE else ROWS * WIDE // columns


def launch(
    kernel: str, tensors: Sequence[Tensor], *strides: int, bits: int, columns: int, groups: int = 1, **sizes: Any
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


def weigh_rows(rows: Tensor, root: Tensor, magnitude: Tensor) -> None:
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
