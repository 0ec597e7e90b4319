"""The Triton kernels. Importing this file takes Triton; kernels.py launches them.

A program has some rows of one expert's matrix, which is transposed, (C, R); all columns of a block or a group that is
rounded stay in registers until the last of them is. weigh_rows has some columns of an expert's (C, T).

They are compiled with `enable_fp_fusion=False`, or the compiler would fuse products and sums. Nothing is added by
tl.sum or tl.dot, whose order is not specified: a group's sums are made in 8 lanes, see symmetric.py.

Legend: E experts, C columns, R rows, g group size, n groups, T tokens;
`…_e` steps in memory from one expert to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import symmetric

LANES = tl.constexpr(symmetric.LANES)


@triton.jit
def bfloat16(x):
    """x rounded to bfloat16, half to even, as float32. By its bits: Triton's interpreter cuts them off instead."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _whole(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x rounded to the nearest whole number, half to even, within LOW … HIGH, which are far below 2²²."""
    magic: tl.constexpr = 12582912.0  # 1.5 · 2²³: adding it leaves no bit for a fraction
    x = tl.minimum(tl.maximum(x, -4194304.0), 4194304.0)
    return tl.minimum(tl.maximum((x + magic) - magic, LOW), HIGH)


@triton.jit
def _row(tile, numbers, k):
    """Row k of (N, ROWS). All others count as zero, so that the order of this sum decides nothing."""
    return tl.sum(tl.where(numbers[:, None] == k, tile, 0.0), 0)


@triton.jit
def _lanes_added(x, ROWS: tl.constexpr):
    """(ROWS, 8) to (ROWS,): neighbours first, see symmetric.py."""
    even, odd = tl.split(tl.reshape(x, (ROWS, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (ROWS, 2, 2)))
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def gptq_block(
    work, factor, scale, group_of, errors, codes,
    R, work_e, factor_e, scale_e, group_e, errors_e, codes_e, factor_row, factor_column,
    W: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See rounding.round_block. Grid (E, R / ROWS)."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < R
    work += expert * work_e + row[None, :]
    errors += expert * errors_e + row
    codes += expert * codes_e + row
    scale += expert * scale_e + row
    factor += expert * factor_e
    group_of += expert * group_e
    columns = tl.arange(0, W)
    left = tl.load(work + columns[:, None] * R, mask=there[None, :], other=0.0)  # (W, ROWS), of each column
    for k in range(W):
        value = _row(left, columns, k)
        step = tl.load(scale + tl.load(group_of + k) * R, mask=there, other=1.0).to(tl.float32)
        code = _whole(tl.div_rn(value, step), LOW, HIGH)
        error = value - code * step
        tl.store(errors + k * R, error, mask=there)
        tl.store(codes + k * R, code.to(tl.int8), mask=there)
        share = tl.load(factor + k * factor_row + columns * factor_column)
        left = left - share[:, None] * error[None, :]  # the columns before it change as well, and are not read again


@triton.jit
def refine_group(
    block, scale, near, image, codes, change,
    R, block_e, scale_e, near_e, image_e, codes_e, change_e, block_row,
    G: tl.constexpr, SIGNED: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See rounding.refine_group. Grid (E, R / ROWS)."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < R
    block += expert * block_e
    scale += expert * scale_e + row
    near += expert * near_e + row
    image += expert * image_e + row
    codes += expert * codes_e + row
    change += expert * change_e + row
    old = tl.load(scale, mask=there, other=1.0).to(tl.float32)
    curvature = tl.zeros((ROWS, LANES), tl.float32)
    gradient = tl.zeros((ROWS, LANES), tl.float32)
    lanes = tl.arange(0, LANES)[None, :] * R
    for k in range(0, G, LANES):
        code = tl.load(codes[:, None] + k * R + lanes, mask=there[:, None], other=0).to(tl.float32)
        curvature = curvature + tl.load(image[:, None] + k * R + lanes, mask=there[:, None], other=0.0) * code
        gradient = gradient + tl.load(near[:, None] + k * R + lanes, mask=there[:, None], other=0.0) * code
    curvature = _lanes_added(curvature, ROWS)
    gradient = _lanes_added(gradient, ROWS)
    new = bfloat16(old + tl.div_rn(gradient, tl.maximum(curvature, 1.1754943508222875e-38)))
    step = new - old
    allowed = (new != 0) & (new > float("-inf")) if SIGNED else new > 0
    better = ((2 * gradient - step * curvature) * step > 0) & allowed & (new < float("inf"))
    step = tl.where(better, step, 0.0)
    now = tl.where(better, new, old)
    tl.store(scale, now.to(tl.bfloat16), mask=there)
    columns = tl.arange(0, G)
    slope = tl.load(image[None, :] + columns[:, None] * R, mask=there[None, :], other=0.0) * step[None, :]
    slope = tl.load(near[None, :] + columns[:, None] * R, mask=there[None, :], other=0.0) - slope  # (G, ROWS)
    for k in range(G):
        code = tl.load(codes + k * R, mask=there, other=0).to(tl.float32)
        inverse = tl.div_rn(1.0, tl.load(block + k * block_row + k))
        best = _whole(tl.div_rn(_row(slope, columns, k) * inverse, now) + code, LOW, HIGH)
        tl.store(change + k * R, code * old - best * now, mask=there)
        tl.store(codes + k * R, best.to(tl.int8), mask=there)
        moved = (best - code) * now
        slope = slope - tl.load(block + columns * block_row + k)[:, None] * moved[None, :]  # see gptq_block


@triton.jit
def mse_scales(
    weight, importance, chosen,
    R, weight_e, importance_e, chosen_e,
    G: tl.constexpr, COUNT: tl.constexpr, FIRST: tl.constexpr, LESS: tl.constexpr, SIGNED: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """See rounding.mse_scales. Grid (E, R / ROWS, n)."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(2)
    there = row < R
    weight += expert * weight_e + group * G * R.to(tl.int64) + row
    importance += expert * importance_e + group * G
    lanes = tl.arange(0, LANES)[None, :]
    above = tl.full((ROWS, LANES), float("-inf"), tl.float32)
    below = above
    for k in range(0, G, LANES):
        value = tl.load(weight[:, None] + k * R + lanes * R, mask=there[:, None], other=0.0)
        above, below = tl.maximum(above, value), tl.maximum(below, -value)
    above, below = tl.max(above, 1), tl.max(below, 1)  # which are the same in any order
    base = bfloat16(tl.div_rn(tl.maximum(above, below), tl.full((ROWS,), (HIGH - LOW) / 2, tl.float32)))
    base = tl.where(base == 0, 1.0, base)
    if SIGNED:
        base = tl.where(above > below, -base, base)
    best_step = base
    best = tl.zeros((ROWS,), tl.float32)
    for i in range((2 if SIGNED else 1) * COUNT + 1):  # the min-max scale itself, then its multiples
        factor = tl.full((), FIRST, tl.float64) - tl.full((), LESS, tl.float64) * ((i - 1) % COUNT)
        factor = tl.where(i > COUNT, -factor, factor).to(tl.float32)
        step = tl.where(i == 0, base, bfloat16(base * factor))
        wide = step[:, None] + tl.zeros((ROWS, LANES), tl.float32)
        loss = tl.zeros((ROWS, LANES), tl.float32)
        for k in range(0, G, LANES):
            value = tl.load(weight[:, None] + k * R + lanes * R, mask=there[:, None], other=0.0)
            lost = _whole(tl.div_rn(value, wide), LOW, HIGH) * wide - value
            loss = loss + lost * lost * tl.load(importance + k + lanes)
        loss = _lanes_added(loss, ROWS)
        better = (loss < best) | (i == 0)
        best = tl.where(better, loss, best)
        best_step = tl.where(better, step, best_step)
    tl.store(chosen + expert * chosen_e + group * R + row, best_step.to(tl.bfloat16), mask=there)


@triton.jit
def weigh_rows(
    rows, root, magnitude,
    C, T, rows_e, root_e, magnitude_e,
    STRIP: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """See kernels.weigh_rows. Grid (E, C / STRIP)."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    lane = tl.arange(0, SUMS)
    here = (row < C)[:, None] & (lane >= 0)[None, :]
    rows += expert * rows_e + row[:, None].to(tl.int64) * T + lane[None, :]
    root += expert * root_e + lane
    place = magnitude + expert * magnitude_e + row[:, None] * SUMS + lane[None, :]
    total = tl.load(place, mask=here, other=0.0)
    for first in range(0, T, SUMS):
        there = first + lane < T
        inside = here & there[None, :]
        weight = tl.load(root + first, mask=there, other=0.0).to(tl.float32)[None, :]
        x = tl.load(rows + first, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(weight == 0, 0.0, bfloat16(x * weight))
        tl.store(rows + first, x.to(tl.bfloat16), mask=inside)
        total = total + bfloat16(tl.abs(x) * weight)
    tl.store(place, total, mask=here)
