"""AWQ's scale search and folding, from Hessians instead of replayed forward passes; see docs/explanation/method.md.

AWQ (Lin et al., https://arxiv.org/abs/2306.00978) looks for the s per column that makes ‖(Q(W s) / s − W) X‖² small.
With D = Q(W s) / s − W this is tr(D H Dᵀ), so H (C, C) = Σ x xᵀ is enough.

Legend: E experts, c experts of a batch, R rows (outputs), C columns (inputs), H hidden, I expert width,
P grid points; B = E for a scale per expert, B = 1 for one scale that all experts share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from quantizers.device.timing import phase
from quantizers.distributed.process_group import ProcessGroup
from quantizers.formats.format import Grid
from quantizers.formats.nvfp4 import E2M1, global_scale
from quantizers.formats.packed_integers import grouped
from quantizers.recipe.schema import Awq, Experts

from .grid import nearest_code_
from .hessians import DownHessian, HessianCache
from .rounding import column_parts, in_groups, minmax_steps
from .routing_weights import ExpertBatch
from .symmetric import row_losses

NORM_ROWS = 2048  # rows read for the norm's scale, of all experts, see `row_step`
WIDTH_ROWS = 768  # and for w2's, of each
LARGEST_STEP = 8

# From the numbers of some experts to their w1 above w3 (c, 2I, H), or w3 alone, and w2 (c, H, I), in the dtype of the
# forward pass, in new memory. Called more than once.
Weights = Callable[[Sequence[int]], tuple[Tensor, Tensor]]


def row_step(rows: int, enough: int) -> int:
    """Step n of a sample of every n-th row: at least `enough` of them, where there are as many, and one in 8.

    A search only compares sums over rows for a few grid points, and a sample of many rows picks the same one.
    """
    return min(LARGEST_STEP, max(1, rows // enough))


def weight_means(weight: Tensor, group: int) -> Tensor:
    """w̄ (E, C) float32: each column's mean over rows of |w| / (largest |w| of its group + 1e-6); weight (E, R, C)."""
    means = torch.empty_like(weight[:, 0])
    for experts, columns in column_parts(weight.mT, group):
        part = weight.mT[experts, columns]
        magnitude = in_groups(torch.abs(part, out=part.new_empty(part.shape)), group)
        magnitude.div_(magnitude.amax(2, keepdim=True).add_(1e-6))
        means[experts, columns] = magnitude.flatten(1, 2).mean(-1)
    return means


def grid_scales(x_mean: Tensor, w_mean: Tensor, grid: int, duo_scaling: bool) -> Tensor:
    """The candidates of the search (P, B, C) float32, P = grid, all finite and positive.

    Duo scaling: the identity, then x̄^r / (w̄^(1−r) + 1e-4) for r = 0 … 1 in `grid - 1` steps; without
    it x̄^r in `grid` steps (r = 0 is the identity). Each is normalised so that max s · min s = 1. x̄ (B, C) float32 is
    the mean |x| of each column's input, w̄ (B, C) that of `weight_means`.
    """
    identity, count = torch.ones_like(x_mean).unsqueeze(0), grid - 1
    steps = torch.arange(grid, dtype=x_mean.dtype, device=x_mean.device)[:, None, None]
    if duo_scaling:
        ratio = steps[:count] / max(count - 1, 1)
        s = x_mean.pow(ratio) / (w_mean.pow(1 - ratio) + 1e-4)
    else:
        s = x_mean.pow(steps[1:] / count)
    s = s.clamp(min=1e-4)
    s = s / (s.amax(-1, keepdim=True) * s.amin(-1, keepdim=True)).sqrt()
    return torch.cat([identity, torch.where(torch.isfinite(s) & (s > 0), s, identity)])


def scale_losses(
    weight: Tensor, hessian: Tensor, scales: Tensor, group: int, grid: Grid, *, signed: bool = True
) -> Tensor:
    """The loss (P, E) of every candidate for every expert, Q with min-max scales as they would be stored.

    All are float32: weight (E, R, C), hessian (B, C, C), scales (P, B, C). Infinity where a loss is not finite.
    """
    weight = weight.mT.contiguous()  # (E, C, R): a column is contiguous
    errors, table = torch.empty_like(weight), []
    peaks = weight.abs().amax(-1, keepdim=True) if grid == E2M1 else None  # (E, C, 1)
    for scale in scales.unsqueeze(-1):  # (B, C, 1)
        s = scale if peaks is None else scale * global_scale((peaks * scale).amax(1, keepdim=True))
        for experts, columns in column_parts(weight, group):
            factor, part = s[experts if len(s) > 1 else slice(None), columns], weight[experts, columns]
            scaled = torch.mul(part, factor, out=errors[experts, columns])
            by_group = in_groups(scaled, group)
            step = minmax_steps(by_group, grid, signed).float().unsqueeze(2)
            nearest_code_(by_group.div_(step), grid).mul_(step)
            scaled.div_(factor).sub_(part)  # Q(W s) / s − W
        table.append(row_losses(errors.mT, hessian).sum(-1))
    losses = torch.stack(table, 1).T
    return torch.where(torch.isfinite(losses), losses, torch.inf)


def fold_norm(norm: Tensor, s: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Divide a stored norm by s, and return the scale that this division really was.

    The file stores the norm in its own dtype, so the quotient is rounded first, and all readers of the norm are
    multiplied by s = norm / norm' exactly. (With the unrounded s every reader would keep an error of up to 2^-9.)

    Args:
        norm: (H,) in the source's dtype.
        s: (H,) float32, positive.
        offset: added to the stored norm by the model: where it is 1, norm means 1 + the stored one everywhere here.

    Returns:
        norm' and s; 1 where the norm, or its quotient, is zero or not finite (there the norm is left as it is).
    """
    effective = offset + norm.float()
    folded = (effective / s - offset).to(norm.dtype)
    divided = offset + folded.float()
    exact = effective / divided
    usable = torch.isfinite(exact) & (exact != 0) & (divided != 0)
    return torch.where(usable, folded, norm), torch.where(usable, exact, 1.0)


def divided(scale: Tensor, codes: Tensor, s: Tensor) -> Tensor:
    """Group scales (E, R, n) bfloat16 of rows that are divided by s (E, R) float32, whose codes (E, R, C) stay.

    They are 1 where a group's codes are all zero, or the quotient is.
    """
    quotient = (scale.float() / s.unsqueeze(-1)).bfloat16()
    unread = ~grouped(codes, codes.shape[-1] // scale.shape[-1]).any(-1)
    return quotient.masked_fill_(unread | (quotient == 0), 1)


def fold_hessian(hessian: Tensor, s: Tensor) -> None:
    """Turn the Hessian of x into that of x / s, in place: H / (s sᵀ). hessian (E, C, C); s (E, C), or (C,) for all."""
    hessian.div_(s.unsqueeze(-1) * s.unsqueeze(-2))


def norm_scale(
    weights: Weights, cache: HessianCache, settings: Experts, batches: Sequence[ExpertBatch], dist: ProcessGroup
) -> tuple[Tensor, dict[str, Tensor]]:
    """The scale (H,) that the norm, the router and every w1 and w3 share, before the norm is rounded.

    Each process searches with its own `batches`, and gets the scale; and the objective before and after, two scalars
    on the device.
    """
    inputs, order = cache.of_all, cache.routing.experts

    def of_all(figures: Callable[[Tensor], Tensor]) -> Tensor:
        """Gather the figures of every expert's w1 and w3, in the order in which they are solved."""

        def of_batch(batch: ExpertBatch) -> Tensor:
            return figures(weights(order[slice(*batch)])[0])

        parts = [cache.within_memory(partial(of_batch, batch)) for batch in batches]
        return dist.all_gather({"rows": torch.cat(parts)} if parts else {}, inputs.hessian.device)["rows"]

    def losses(gate_up: Tensor) -> Tensor:
        step = row_step(len(order) * gate_up.shape[1], NORM_ROWS)
        return _sampled_losses(gate_up, inputs.hessian.unsqueeze(0), grid, settings, step).T  # (c, P)

    mean = of_all(lambda gate_up: weight_means(gate_up.float(), settings.group_size)).mean(0, keepdim=True)
    grid = _candidates(inputs.mean.unsqueeze(0), mean, settings)
    total = of_all(losses).double().sum(0)  # (P,), added in the order in which they are solved
    best = total.argmin().view(1)
    before, after = total[0], total.index_select(0, best)[0]
    return grid.index_select(0, best)[0, 0], {"norm_search_before": before, "norm_search_after": after}


def width_scale(down: Tensor, inputs: DownHessian, settings: Experts) -> tuple[Tensor, dict[str, Tensor]]:
    """A scale (c, I) for each expert between w3 and w2 (c, H, I) float32, and its objective (c,) before and after."""
    with phase("search"):
        grid = _candidates(inputs.mean, weight_means(down, settings.group_size), settings)
        losses = _sampled_losses(down, inputs.hessian, grid, settings, row_step(down.shape[1], WIDTH_ROWS))
        best = losses.argmin(0)
        chosen = grid[best, torch.arange(len(best), device=best.device)]
        after = losses.gather(0, best.unsqueeze(0))[0].double()
        return chosen, {"down_search_before": losses[0].double(), "down_search_after": after}


def _candidates(x_mean: Tensor, w_mean: Tensor, settings: Experts) -> Tensor:
    assert isinstance(settings.awq, Awq)
    return grid_scales(x_mean, w_mean, settings.awq.grid, settings.awq.duo_scaling)


def _sampled_losses(weight: Tensor, hessian: Tensor, scales: Tensor, settings: Experts, step: int) -> Tensor:
    """The losses (P, E) of `scale_losses`, from every `step`-th row of weights of any dtype."""
    rows, on = weight[:, ::step].float(), settings.scheme.grid
    return scale_losses(rows, hessian, scales, settings.group_size, on, signed=settings.signed).mul_(step)
