"""What one launch of this program's own kernels costs, see forward/fused and solve/fused.

Every byte of device memory is moved once: what a program reads again lies in the cache next to it. Arithmetic is
instructions of a thread, counted in the kernels, and each counts as two operations, since the rate that vendors state
is that of multiplying and adding at once. The columns of a block or group take their turn, however little each is.
Kernels that do little to what they move cost their bytes alone.

Legend: W columns of a block or group; R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .work import Operation

# Instructions for each number of a (W, R) block: to divide, round and store it once, and for each of the W columns to
# be selected from, added, multiplied and subtracted. And for one number under one scale that is tried: one of its
# group; or one of the columns, by which it is multiplied and divided as well.
ONCE, EACH_COLUMN, EACH_SCALE, EACH_POINT = 40, 4, 35, 60


def _gptq_block(made: torch.Tensor | None, *given: Any) -> Operation:
    work, factor, scale, group_of, errors, codes, _ = given
    experts, columns, rows = work.shape
    scales = experts * min(scale.shape[1], columns) * rows * scale.element_size()
    read = work.nbytes + factor.nbytes + group_of.nbytes + scales
    flops = 2 * (ONCE + EACH_COLUMN * columns) * work.numel()
    return Operation("gptq_block", 1, read, errors.nbytes + codes.nbytes, flops, "float32", columns)


def _refine_group(made: torch.Tensor | None, *given: Any) -> Operation:
    block, scale, near, image, codes, change, _ = given
    columns = codes.shape[1]
    read = block.nbytes + scale.nbytes + near.nbytes + image.nbytes + codes.nbytes
    flops = 2 * (ONCE + EACH_COLUMN * columns) * codes.numel()
    written = scale.nbytes + codes.nbytes + change.nbytes
    return Operation("refine_group", 1, read, written, flops, "float32", columns)


def _mse_scales(made: torch.Tensor | None, *given: Any) -> Operation:
    weight, importance, _, _, count, _, _ = given
    assert made is not None
    flops = 2 * EACH_SCALE * (count + 1) * weight.numel()
    return Operation("mse_scales", 1, weight.nbytes + importance.nbytes, made.nbytes, flops, "float32")


def _tried_errors(made: torch.Tensor | None, *given: Any) -> Operation:
    weight, scales, errors, _, _ = given
    flops = 2 * EACH_POINT * errors.numel()
    return Operation("tried_errors", 1, weight.nbytes + scales.nbytes, errors.nbytes, flops, "float32")


def _gate_rows(made: torch.Tensor | None, *given: Any) -> Operation:
    gate, up, unusable = given
    return Operation("gate_rows", 1, gate.nbytes + up.nbytes, gate.nbytes + unusable.nbytes)


def _weigh_rows(made: torch.Tensor | None, *given: Any) -> Operation:
    rows, _, magnitude = given
    return Operation("weigh_rows", 1, sum(t.nbytes for t in given), rows.nbytes + magnitude.nbytes)


def _summed_products(made: torch.Tensor | None, *given: Any) -> Operation:
    assert made is not None
    return Operation("summed_products", 1, sum(t.nbytes for t in given), made.nbytes)


def _token_roots(made: torch.Tensor | None, *given: Any) -> Operation:
    assert made is not None
    return Operation("token_roots", 1, sum(t.nbytes for t in given), made.nbytes)


def _dequantize(made: torch.Tensor | None, *given: Any) -> Operation:
    codes, scale, slot, finite, *_ = given
    return Operation("dequantize", 1, codes.nbytes + scale.nbytes, slot.nbytes + finite.nbytes)


COSTS: dict[str, Callable[..., Operation]] = {
    "gptq_block": _gptq_block, "refine_group": _refine_group, "mse_scales": _mse_scales,
    "tried_errors": _tried_errors, "summed_products": _summed_products, "token_roots": _token_roots,
    "gate_rows": _gate_rows, "weigh_rows": _weigh_rows, "dequantize": _dequantize,
}  # fmt: skip


def own_cost(function: Any, args: Sequence[Any], made: torch.Tensor | None) -> Operation | None:
    """The cost of an overload of `torch.ops.quantizers`, given its arguments and result; None of any other."""
    room, _, name = function._schema.name.partition("::")
    return COSTS[name](made, *args) if room == "quantizers" else None
