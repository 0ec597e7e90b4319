"""The torch operator that launches the kernel: `torch.ops.quantizers.dequantize`.

As an operator it is seen by whatever follows torch's dispatch. On the meta device, where work is only counted, it does
nothing and needs no Triton.
"""

from __future__ import annotations

from typing import Any

import torch

from quantizers.device.fused import OPTIONS, WIDER, launched

ROWS, COLUMNS = 8, 512  # of a program on a GPU
INTERPRETED = 256  # rows of a program in Triton's interpreter, where every operation takes as long


@torch.library.custom_op("quantizers::dequantize", mutates_args=("slot", "finite"))
def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    slot: torch.Tensor,
    finite: torch.Tensor,
    rows: int,
    columns: int,
    bits: int,
) -> None:
    """Codes times scales, rounded to the slot's dtype.

    Args:
        codes: (c · R, …) contiguous, a row of C codes in one piece: F8_E4M3, or words of packed integers, see
            packing.py.
        scale: (c · R / rows, n) contiguous, of any floating type: each of `rows` x `columns` numbers.
        slot: (c, R, C) float32 or bfloat16, each matrix in one piece; filled.
        finite: see `looks_at`; filled: whether all numbers of a part are finite, before they are rounded.
        bits: of packed integers; 0 where codes are FP8.
    """
    from .kernels import dequantize as kernel

    _, length, width = slot.shape
    launched(kernel, tuple(finite.shape), slot)(
        codes.view(torch.uint8), scale, slot, finite.view(torch.int8),
        length, width, scale.shape[1], slot.stride(0), rows, columns,
        BITS=bits, ROUNDED=slot.dtype == torch.bfloat16, ROWS=_rows(slot), COLUMNS=COLUMNS, **(OPTIONS | WIDER),
    )  # fmt: skip


def looks_at(slot: torch.Tensor) -> torch.Tensor:
    """Memory for whether the parts of numbers (c, R, C) are finite, each those of one program: (c, r, k) bool."""
    matrices, length, width = slot.shape
    parts = matrices, -(-length // _rows(slot)), -(-width // COLUMNS)
    return torch.empty(parts, dtype=torch.bool, device=slot.device)


def _rows(slot: torch.Tensor) -> int:
    return INTERPRETED if slot.is_cpu else ROWS


@dequantize.register_fake
def _(*_: Any) -> None:
    pass
