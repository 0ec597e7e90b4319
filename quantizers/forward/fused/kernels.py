"""The kernel. Importing this file takes Triton; operators.py launches it.

Legend: c matrices, R rows, C columns, n scales of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bfloat16(x):
    """x rounded to bfloat16, half to even, as float32. By its bits: Triton's interpreter cuts them off instead."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(byte):
    """The number that a byte of FP8 stands for, as float32. By its bits: not every card knows the type."""
    size = (byte & 0x7F).to(tl.int32)
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)  # its exponent is biased by 7, not by 127
    x = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    x = tl.where(size == 0x7F, float("nan"), x)
    sign = (byte & 0x80).to(tl.uint32) << 24  # by its bit: some of Triton's versions make 0 of -0
    return (x.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def dequantize(
    codes, scale, slot, finite,
    R, C, n, slot_e, scale_rows, scale_columns,
    BITS: tl.constexpr, ROUNDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See operators.dequantize. Grid (c, R / ROWS, C / COLUMNS)."""
    matrix = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    there = row < R
    here = there[:, None] & (column < C)[None, :]
    below = matrix * R + row  # all matrices lie one below the other
    if BITS == 4:
        pair = tl.program_id(2) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        both = there[:, None] & (pair < C // 2)[None, :]
        byte = tl.load(codes + below[:, None] * (C // 2) + pair[None, :], mask=both, other=0)
        x = tl.reshape(tl.join(byte & 15, byte >> 4), (ROWS, COLUMNS)).to(tl.float32) - 8
    else:
        byte = tl.load(codes + below[:, None] * C + column[None, :], mask=here, other=0)
        x = byte.to(tl.float32) - 128 if BITS == 8 else _e4m3(byte)
    place = (below // scale_rows)[:, None] * n + (column // scale_columns)[None, :]
    x = x * tl.load(scale + place, mask=here, other=1).to(tl.float32)
    fine = tl.where((tl.abs(x) < float("inf")) | (here == 0), 1, 0)
    part = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(finite + part, tl.min(tl.min(fine, 1), 0).to(tl.int8))
    place = slot + matrix * slot_e + row[:, None] * C + column[None, :]
    if ROUNDED:
        x = tl.where(x == x, bfloat16(x), x)  # the bits of NaN would become another number's
        tl.store(place, x.to(tl.bfloat16), mask=here)
    else:
        tl.store(place, x, mask=here)
