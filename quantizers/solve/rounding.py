"""Group scales and integer codes: min-max or weighted-MSE scales, nearest or GPTQ rounding.

Legend: E experts, R rows (outputs), C columns (inputs), g group size, n = C / g groups.
All functions are pure, batched over experts, and run on whatever device their tensors are on.
Scales are bfloat16 because that is what the file stores and what a server reads: a code rounded
against a finer scale would be a different weight there.

GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323. Columns in the order of falling diagonal:
its "act-order", here with the groups' scales fixed beforehand, so that no g_idx is needed.

The inner loops, `round_block` and `mse_steps`, keep the rule of solve/kernels: a kernel there takes their place on a
GPU, and gives the same bits.
"""

from __future__ import annotations

import torch

from quantizers.device.triton_support import use_kernel
from quantizers.forward.codes import code_range, grouped

from .inverse_factor import inverse_factor
from .kernels import launch
from .parts import column_parts, in_groups
from .sum_in_order import sum_in_order

DAMPING = 0.01  # of Gram matrices, as a share of their mean diagonal
MSE_COUNT, MSE_FIRST, MSE_LESS = 20, 1.05, 0.02
MSE_FACTORS = tuple(MSE_FIRST - MSE_LESS * k for k in range(MSE_COUNT))
BLOCK = 32  # GPTQ columns handled by one kernel; before it they get, by one matmul, what their panel has made of errors
PANEL = 256  # columns that get, by one matmul, all errors of the panels before them


def minmax_scales(weight: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Scale per group from the largest magnitude: max|w| / 7.5 for 4 bits, as compressed-tensors does.

    Args:
        weight: (…, R, C) float32, C a multiple of `group`.

    Returns:
        (…, R, n) bfloat16; 1 where a group is all zero.
    """
    low, high = code_range(bits)
    scale = (grouped(weight, group).abs().amax(-1) / ((high - low) / 2)).bfloat16()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def minmax_steps(by_group: torch.Tensor, bits: int) -> torch.Tensor:
    """As `minmax_scales`, (…, n, R) bfloat16, of a matrix that lies transposed: (…, n, g, R) float32."""
    low, high = code_range(bits)
    largest = torch.maximum(by_group.amax(-2), by_group.amin(-2).neg_())
    # Not by a number of Python: torch would multiply by its reciprocal on a GPU.
    scale = largest.div_(torch.full_like(largest[..., :1], (high - low) / 2)).bfloat16()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def nearest(weight: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes nearest to weight / scale.

    Args:
        weight: (…, R, C) float32.
        scale: (…, R, n) bfloat16.

    Returns:
        (…, R, C) int8, within the code range.
    """
    view = grouped(weight, weight.shape[-1] // scale.shape[-1])
    return (view / scale.float().unsqueeze(-1)).round_().clamp_(*code_range(bits)).flatten(-2).to(torch.int8)


def mse_scales(weight: torch.Tensor, importance: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """The best of the min-max scale and 20 multiples of it, by squared error weighted per column.

    Args:
        weight: (E, R, C) float32.
        importance: (E, C) float32, not negative: the diagonal of the columns' Gram matrix.

    Returns:
        (E, R, n) bfloat16; min-max where nothing is smaller, as where the importance is all zero.
    """
    experts, rows, columns = weight.shape
    if use_kernel("mse_scales", weight.device):
        steps = launch.mse_scales(
            weight.mT.contiguous(), importance.contiguous(), group, bits, MSE_COUNT, MSE_FIRST, MSE_LESS
        )
        return steps.mT.contiguous()
    chosen = torch.empty(experts, columns // group, rows, dtype=torch.bfloat16, device=weight.device)
    for some, part in column_parts(weight.mT, group):
        by_group = in_groups(weight.mT[some, part].contiguous(), group)
        column = grouped(importance[some, part], group).unsqueeze(-1)  # (e, n, g, 1)
        chosen[some, part.start // group : part.stop // group] = mse_steps(by_group, column, bits)
    return chosen.mT.contiguous()


def mse_steps(by_group: torch.Tensor, column: torch.Tensor, bits: int) -> torch.Tensor:
    """Scales (e, n, R) bfloat16 of a part (e, n, g, R), whose columns count as much as `column` (e, n, g, 1) says."""
    chosen = minmax_steps(by_group, bits)
    base, error = chosen.float(), torch.empty_like(by_group)

    def loss_of(scale: torch.Tensor) -> torch.Tensor:
        step = scale.float().unsqueeze(2)
        torch.div(by_group, step, out=error).round_().clamp_(*code_range(bits)).mul_(step).sub_(by_group)
        return sum_in_order(error.square_().mul_(column))

    best = loss_of(chosen)
    for factor in MSE_FACTORS:
        scale = (base * factor).bfloat16()
        loss = loss_of(scale)
        better = loss < best
        best = torch.where(better, loss, best)
        chosen = torch.where(better, scale, chosen)
    return chosen


def damped(gram: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """gram (E, C, C) + damping (E,) times its mean diagonal on the diagonal; 1 where that is not finite or zero."""
    added = damping * gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    added = torch.where(torch.isfinite(added) & (added > 0), added, torch.ones_like(added))
    result = gram.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(added.unsqueeze(-1))
    return result


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    damping: float = DAMPING,
    *,
    careful: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round column by column, each column's error spread over those not yet rounded.

    Args:
        weight: (E, R, C) float32.
        gram: (E, C, C) float32: Σ x xᵀ of what multiplies the columns.
        scale: (E, R, n) bfloat16, fixed beforehand.
        damping: share of the mean diagonal added to the diagonal.
        careful: see `inverse_factor`.

    Returns:
        Codes (E, R, C) int8, and the damping used (E,), see `inverse_factor`.
        Where that is infinite the codes are those of `nearest`.
    """
    experts, rows, columns = weight.shape
    order = gram.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)  # (E, C)
    factor, used = inverse_factor(_in_order(_in_order(gram, order).mT, order), damping, careful=careful)
    # An error's share in each later column.
    factor.div_(factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone())
    # Transposed, (E, C, R): a column then lies in one piece, and so do all later ones.
    work = _in_order(weight.mT, order)
    steps, group_of = scale.mT.contiguous(), (order // (columns // scale.shape[-1])).int()
    codes = torch.empty_like(work, dtype=torch.int8)
    errors = torch.empty(experts, min(PANEL, columns), rows, dtype=work.dtype, device=work.device)
    round_one = launch.gptq_block if use_kernel("gptq_block", work.device) else round_block
    for first in range(0, columns, PANEL):
        last = min(first + PANEL, columns)
        if first:
            work[:, first:last].baddbmm_(factor[:, :first, first:last].mT, work[:, :first], alpha=-1)
        for start in range(first, last, BLOCK):
            end = min(start + BLOCK, last)
            own, left = slice(start, end), errors[:, start - first : end - first]
            if start > first:
                work[:, own].baddbmm_(factor[:, first:start, own].mT, errors[:, : start - first], alpha=-1)
            round_one(work[:, own], factor[:, own, own], steps, group_of[:, own], left, codes[:, own], bits)
        # These columns are done with: their errors, which later ones need, take their place.
        work[:, first:last] = errors[:, : last - first]
    # Taken by the inverse order. To scatter by the order gives the same, but where algorithms must be deterministic,
    # torch does that on a GPU by sorting all elements, with several int64 for each of them in memory.
    return _in_order(codes, order.argsort(dim=-1)).mT, used


def round_block(
    work: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    group_of: torch.Tensor,
    errors: torch.Tensor,
    codes: torch.Tensor,
    bits: int,
) -> None:
    """Round the columns of a block, each column's error spread over those after it in the block.

    Arguments are those of `launch.gptq_block`; `work` is changed.
    """
    steps, rounded, shares = _in_order(scale, group_of.long()).float(), *(torch.empty_like(work) for _ in range(2))
    columns = (tensor.unbind(1) for tensor in (work, steps, rounded, errors))
    for j, (column, step, code, error) in enumerate(zip(*columns, strict=True)):
        torch.div(column, step, out=code).round_().clamp_(*code_range(bits))
        torch.sub(column, torch.mul(code, step, out=error), out=error)
        later = torch.mul(factor[:, j, j + 1 :, None], error.unsqueeze(1), out=shares[:, j + 1 :])
        work[:, j + 1 :].sub_(later)
    codes.copy_(rounded)


def _in_order(matrices: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The rows of (E, M, N) in another order for each expert, (E, m, N) contiguous; order (E, m) int64."""
    # The index is a view of `order`, and takes no memory.
    return matrices.gather(1, order.unsqueeze(-1).expand(-1, -1, matrices.shape[-1]))
