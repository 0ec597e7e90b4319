"""Group scales and integer codes: min-max or weighted-MSE scales, nearest or GPTQ rounding, coordinate descent.

Formulas and papers are in docs/explanation/method.md. All functions are pure, and batched over experts. Scales are
bfloat16 as the file stores them and a server reads them: a code rounded against a finer scale would be a different
weight there. Each inner loop, `round_block`, `mse_scales` and `refine_group`, is a kernel on a GPU, see kernels.py.

Legend: E experts, R rows (outputs), C columns (inputs), g group size, n = C / g groups, H the columns' Hessian.
`signed`: a scale may be negative. Codes reach one further down than up, from -8 to 7 with 4 bits, and a negative scale
turns that side to where a group needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from quantizers.device.devices import is_accelerator
from quantizers.device.triton_support import use_kernel
from quantizers.formats.format import Grid
from quantizers.formats.nvfp4 import E2M1
from quantizers.formats.packed_integers import dequantize, grouped
from quantizers.planning.solver_arrays import PANEL

from . import kernels
from .damping import damped_cholesky
from .grid import MSE_COUNT, MSE_FIRST, MSE_LESS, nearest_code_, reach, scale_candidates, stored_scale
from .symmetric import LANES, ordered_sum

BLOCK = 32  # GPTQ columns of one kernel; one matmul adds the errors of their panel (PANEL columns) before it
PART = 2**19  # numbers of a part that stays in a CPU's cache: 2 MiB of float32


def minmax_scales(weight: Tensor, group: int, grid: Grid, *, signed: bool = True) -> Tensor:
    """Scale per group (…, R, n) bfloat16 from the largest magnitude in weight (…, R, C), 1 where that is zero.

    max|w| / 7.5 for 4 bits and max|w| / 6 for E2M1, as compressed-tensors does; if `signed`, that of integers is
    negative where the largest value is positive.
    """
    rows = weight.shape[-2]
    return minmax_steps(weight.mT.view(*weight.shape[:-2], -1, group, rows), grid, signed).mT.contiguous()


def minmax_steps(by_group: Tensor, grid: Grid, signed: bool) -> Tensor:
    """As `minmax_scales`, (…, n, R) bfloat16, of a transposed matrix (…, n, g, R) float32."""
    above, below = by_group.amax(-2), by_group.amin(-2).neg_()
    turned = above > below
    largest = torch.maximum(above, below, out=above)
    # Not by a number of Python: torch would multiply by its reciprocal on a GPU.
    scale = stored_scale(largest.div_(torch.full_like(largest[..., :1], reach(grid))), grid)
    scale = torch.where(scale == 0, 1, scale)
    return torch.where(turned, -scale, scale) if signed and grid != E2M1 else scale


def nearest(weight: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """Codes (…, R, C) int8 nearest to weight (…, R, C) / scale (…, R, n), within the code range."""
    view = grouped(weight, weight.shape[-1] // scale.shape[-1])
    return nearest_code_(view / scale.float().unsqueeze(-1), grid).flatten(-2).to(torch.int8)


def mse_scales(
    weight: Tensor, importance: Tensor, group: int, grid: Grid, *, signed: bool = True, by_kernel: bool | None = None
) -> Tensor:
    """The best of the min-max scale and 20 multiples of it, (E, R, n) bfloat16, by squared error weighted per column.

    If `signed`, each multiple is tried with both signs. E2M1 has other candidates, see grid.py.

    Both are float32: weight (E, R, C), and importance (E, C), not negative: the diagonal of the columns' Hessian. Where
    all of it is zero, the min-max scale is the best. `by_kernel` is for verification alone.
    """
    experts, rows, columns = weight.shape
    chosen = torch.empty(experts, columns // group, rows, dtype=torch.bfloat16, device=weight.device)
    by_kernel = use_kernel("mse_scales", weight.device) if by_kernel is None else by_kernel
    if by_kernel and grid != E2M1:
        tensors = (weight.mT.contiguous(), importance.contiguous(), chosen)
        kernels.launch(
            "mse_scales", tensors, bits=grid, columns=LANES, groups=columns // group,
            G=group, COUNT=MSE_COUNT, FIRST=MSE_FIRST, LESS=MSE_LESS, SIGNED=signed,
        )  # fmt: skip
        return chosen.mT.contiguous()
    for some_experts, some_columns in column_parts(weight.mT, group):
        by_group = in_groups(weight.mT[some_experts, some_columns].contiguous(), group)
        column = grouped(importance[some_experts, some_columns], group).unsqueeze(-1)  # (e, n, g, 1)
        chosen[some_experts, some_columns.start // group : some_columns.stop // group] = mse_steps(
            by_group, column, grid, signed
        )
    return chosen.mT.contiguous()


def mse_steps(by_group: Tensor, column: Tensor, grid: Grid, signed: bool) -> Tensor:
    """Scales (e, n, R) bfloat16 of a part (e, n, g, R), with the importance `column` (e, n, g, 1) of each column."""
    chosen = base = minmax_steps(by_group, grid, signed)
    error = torch.empty_like(by_group)

    def loss_of(scale: Tensor) -> Tensor:
        step = scale.float().unsqueeze(2)
        nearest_code_(torch.div(by_group, step, out=error), grid).mul_(step).sub_(by_group)
        return ordered_sum(error.square_().mul_(column))

    best = loss_of(chosen)
    for scale in scale_candidates(base, grid, signed):
        loss = loss_of(scale)
        better = loss < best
        best = torch.where(better, loss, best)
        chosen = torch.where(better, scale, chosen)
    return chosen


def gptq(weight: Tensor, hessian: Tensor, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Codes (E, R, C) int8 column by column, each column's error spread over those not yet rounded; the damping (E,).

    GPTQ: Frantar et al., https://arxiv.org/abs/2210.17323, columns in the order of falling diagonal, its "act-order".
    Scales (E, R, n) bfloat16 are fixed beforehand, so that no g_idx is needed. The hessian (E, C, C) float32 is Σ x xᵀ
    of what multiplies the columns of weight (E, R, C) float32. Damping is that of `cholesky_inverse`; where it is
    infinite, the codes are `nearest`.
    """
    experts, rows, columns = weight.shape
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)  # (E, C)
    factor, damping = cholesky_inverse(_in_order(_in_order(hessian, order).mT, order))
    # An error's share in each later column.
    factor.div_(factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone())
    # Transposed, (E, C, R): a column is contiguous, and so are all later ones.
    work = _in_order(weight.mT, order)
    steps, group_of = scale.mT.contiguous(), (order // (columns // scale.shape[-1])).int()
    codes = torch.empty_like(work, dtype=torch.int8)
    errors = torch.empty(experts, min(PANEL, columns), rows, dtype=work.dtype, device=work.device)
    by_kernel = use_kernel("gptq_block", work.device)
    for first in range(0, columns, PANEL):
        last = min(first + PANEL, columns)
        if first:
            work[:, first:last].baddbmm_(factor[:, :first, first:last].mT, work[:, :first], alpha=-1)
        for start in range(first, last, BLOCK):
            end = min(start + BLOCK, last)
            block, left = slice(start, end), errors[:, start - first : end - first]
            if start > first:
                work[:, block].baddbmm_(factor[:, first:start, block].mT, errors[:, : start - first], alpha=-1)
            round_block(
                work[:, block], factor[:, block, block], steps, group_of[:, block], left, codes[:, block],
                grid, by_kernel,
            )  # fmt: skip
        # These columns are finished: their errors, which later ones need, replace them.
        work[:, first:last] = errors[:, : last - first]
    # Gathered by the inverse order: a deterministic scatter on a GPU sorts all elements, with several int64 for each.
    return _in_order(codes, order.argsort(dim=-1)).mT, damping


def round_block(
    work: Tensor,
    factor: Tensor,
    scale: Tensor,
    group_of: Tensor,
    errors: Tensor,
    codes: Tensor,
    grid: Grid,
    by_kernel: bool,
) -> None:
    """Round the columns of a block of W one by one, each less its share of the errors before it.

    Args:
        work: (E, W, R) float32, the columns less the errors spread to them so far. Worthless afterwards.
        factor: (E, W, W) float32, an error's (row) share in each later column.
        scale: (E, n, R) bfloat16, of all groups.
        group_of: (E, W) int32, the group of each column.
        errors: (E, W, R) float32, filled.
        codes: (E, W, R) int8, filled.
    """
    if by_kernel and grid != E2M1:
        width, tensors = work.shape[1], (work, factor, scale, group_of, errors, codes)
        kernels.launch("gptq_block", tensors, *factor.stride()[1:], bits=grid, columns=width, W=width)
        return
    steps, rounded, shares = _in_order(scale, group_of.long()).float(), *(torch.empty_like(work) for _ in range(2))
    columns = (tensor.unbind(1) for tensor in (work, steps, rounded, errors))
    for j, (column, step, code, error) in enumerate(zip(*columns, strict=True)):
        nearest_code_(torch.div(column, step, out=code), grid)
        torch.sub(column, torch.mul(code, step, out=error), out=error)
        later = torch.mul(factor[:, j, j + 1 :, None], error.unsqueeze(1), out=shares[:, j + 1 :])
        work[:, j + 1 :].sub_(later)
    codes.copy_(rounded)


def _in_order(matrices: Tensor, order: Tensor) -> Tensor:
    """The rows of (E, M, N) in another order for each expert, (E, m, N) contiguous; order (E, m) int64."""
    # The index is a view of `order`, and takes no memory.
    return matrices.gather(1, order.unsqueeze(-1).expand(-1, -1, matrices.shape[-1]))


def cholesky_inverse(hessian: Tensor) -> tuple[Tensor, Tensor]:
    """U (E, C, C), upper triangular, with inverse(H) = Uᵀ U for H = hessian (E, C, C) + λ I; and the damping (E,).

    With A upper triangular and H = A Aᵀ, U is A's inverse; A comes from the Cholesky factor of H with rows and columns
    reversed. One factorization and one triangular solve, where inverting H first and factoring the inverse would need
    three. Where no damping helped, see damping.py, it is infinite, and U is the identity.
    """
    work = hessian.flip(-1, -2)
    lower, failed, damping = damped_cholesky(work, hessian.diagonal(dim1=-2, dim2=-1).mean(-1))
    # U is the identity there; and A is inverted by solving for the identity, in the memory of H.
    lower.masked_fill_(failed[:, None, None], 0)
    lower.diagonal(dim1=-2, dim2=-1).masked_fill_(failed.unsqueeze(-1), 1)
    work.zero_()
    work.diagonal(dim1=-2, dim2=-1).fill_(1)
    # The solver takes contiguous columns, and gets them: as it overwrites the identity, nothing is copied.
    torch.linalg.solve_triangular(lower, work.mT, upper=False, out=work.mT)
    return work.mT.flip(-1, -2), damping


def refine(
    weight: Tensor, hessian: Tensor, codes: Tensor, scale: Tensor, grid: Grid, *, signed: bool = True, sweeps: int = 1
) -> tuple[Tensor, Tensor]:
    """Coordinate descent: codes (E, R, C) int8 and scales (E, R, n) bfloat16, not zero, after sweeps over all groups.

    The hessian (E, C, C) of weight (E, R, C) is damped, so that its diagonal is positive; both are float32. With
    P = (W − Ŵ) H at hand the loss is a parabola in a single group's scale, and in a single code, so each is set to its
    best value in turn, by which the loss never rises. A panel of columns gets its part of P by one matmul, and each of
    its groups by another the changes of the groups before it, so that a sweep multiplies by H once.
    """
    group = codes.shape[2] // scale.shape[2]
    # All are transposed, (E, C, R) and (E, n, R), so that a column is contiguous; `difference` is (W − Ŵ)ᵀ.
    difference = dequantize(codes, scale)
    difference = torch.sub(weight, difference, out=difference).mT.contiguous()
    codes, scale = (tensor.mT.clone(memory_format=torch.contiguous_format) for tensor in (codes, scale))
    by_group = hessian.view(len(hessian), -1, group, hessian.shape[2] // group, group)
    blocks = by_group.diagonal(dim1=1, dim2=3).movedim(-1, 1).contiguous()  # (E, n, g, g)
    columns, panel = codes.shape[1], max(1, PANEL // group) * group
    by_kernel = use_kernel("refine_group", codes.device)
    for _, first in product(range(sweeps), range(0, columns, panel)):
        chosen = slice(first, min(first + panel, columns))
        near = torch.bmm(hessian[:, chosen], difference)  # Pᵀ
        change = codes[:, chosen].float()
        groups = range(first // group, chosen.stop // group)
        image = blocks[:, groups.start : groups.stop] @ in_groups(change, group)
        for at in groups:
            whole = slice(at * group, (at + 1) * group)
            in_panel = slice(whole.start - first, whole.stop - first)
            if in_panel.start:
                near[:, in_panel].baddbmm_(hessian[:, whole, first : whole.start], change[:, : in_panel.start])
            refine_group(
                blocks[:, at], scale[:, at], near[:, in_panel], image[:, at - groups.start], codes[:, whole],
                change[:, in_panel], grid, signed, by_kernel,
            )  # fmt: skip
        difference[:, chosen].add_(change)
    return codes.mT.contiguous(), scale.mT.contiguous()


def refine_group(
    block: Tensor,
    scale: Tensor,
    near: Tensor,
    image: Tensor,
    codes: Tensor,
    change: Tensor,
    grid: Grid,
    signed: bool,
    by_kernel: bool,
) -> None:
    """Set a group's scale, and then its codes one by one, each to the best given all others.

    Args:
        block: (E, g, g) float32, the group's own part of the Hessian H.
        scale: (E, R) bfloat16, set.
        near: (E, g, R) float32, the group's columns of Pᵀ. Worthless afterwards.
        image: (E, g, R) float32, block @ codes. Worthless afterwards.
        codes: (E, g, R) int8, set.
        change: (E, g, R) float32, filled: Ŵᵀ before less Ŵᵀ after.
    """
    if by_kernel and grid != E2M1:
        group, tensors = codes.shape[1], (block, scale, near, image, codes, change)
        kernels.launch("refine_group", tensors, block.stride(1), bits=grid, columns=group, G=group, SIGNED=signed)
        return
    old, before = scale.float(), codes.float()
    curvature, gradient = ordered_sum(torch.stack((image, near)).mul_(before))
    rounded = stored_scale(old + gradient / curvature.clamp(min=torch.finfo(torch.float32).tiny), grid)
    step = rounded.float() - old
    # Rounded, the step may overshoot: take it only where the parabola is lower there.
    better = (2 * gradient - step * curvature) * step > 0
    better &= ((rounded != 0) if signed else (rounded > 0)) & torch.isfinite(rounded)
    scale.copy_(torch.where(better, rounded, scale))
    near.sub_(image.mul_(torch.where(better, step, 0).unsqueeze(1)))
    now = scale.float()
    inverse = (1 / block.diagonal(dim1=-2, dim2=-1)).unsqueeze(-1)  # (E, g, 1)
    after = torch.empty_like(before)
    columns = (tensor.unbind(1) for tensor in (near, inverse, before, after))
    for j, (slope, inverted, code, best) in enumerate(zip(*columns, strict=True)):
        nearest_code_(torch.mul(slope, inverted, out=best).div_(now).add_(code), grid)
        moved = torch.sub(best, code).mul_(now)
        later = torch.mul(block[:, j + 1 :, j, None], moved.unsqueeze(1), out=image[:, j + 1 :])
        near[:, j + 1 :].sub_(later)
    codes.copy_(after)
    torch.mul(before, old.unsqueeze(1), out=change)
    change.sub_(torch.mul(codes, now.unsqueeze(1), out=image))


def column_parts(columns_first: Tensor, group: int) -> Iterator[tuple[slice, slice]]:
    """Experts and columns of each part of (E, C, R): whole groups of columns of one expert, or whole experts.

    A CPU does all passes over a part before it starts the next, so that the part stays in the cache. The columns of a
    part follow from C, R and the group alone, not from E. On an accelerator everything is one part.
    """
    experts, columns, rows = columns_first.shape
    if is_accelerator(columns_first.device):
        yield slice(0, experts), slice(0, columns)
        return
    width = min(columns, max(1, PART // (group * rows)) * group)
    together = max(1, PART // (rows * columns)) if width == columns else 1
    for expert in range(0, experts, together):
        for column in range(0, columns, width):
            yield slice(expert, min(expert + together, experts)), slice(column, min(column + width, columns))


def in_groups(part: Tensor, group: int) -> Tensor:
    """View (e, C, R) as (e, n, g, R)."""
    return part.view(part.shape[0], -1, group, part.shape[2])
