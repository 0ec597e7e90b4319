"""One expert batch: from the Hessians of its inputs to codes and scales.

w1 and w3 are rounded first, and w2's Hessian is that of the inputs which the rounded ones give it. w2 is corrected for
the difference (`corrected`), a scale s per expert between w3 and w2 is searched, and w2 is rounded.

With 8 bits s comes first. Found afterwards, it would divide w3's stored group scales, which bfloat16 then rounds a
second time. That is far below the codes' error at 4 bits, but 4 to 39 % of it at 8. So s is searched from what the
source's w1 and w3 give w2 (the rounded ones differ by half a percent), on a part of large sets, and w3 / s is rounded
as it is stored: a median KL of 4.22e-6 on the tiny model instead of 4.58e-6.

Legend: c experts of the batch, H hidden, I expert width, R rows, C columns, P grid points.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.device.timing import phase
from quantizers.formats.packed_integers import dequantize
from quantizers.recipe.schema import Awq, Experts

from .awq import divided, fold_hessian, grid_scales, row_step, scale_losses, weight_means
from .coordinate_descent import refine
from .down_hessian import DownHessian
from .rounding import DAMPING, damped, gptq, minmax_scales, mse_scales, nearest
from .symmetric import row_losses

SEARCH_ROWS, REPORTED_ROWS = 768, 512  # rows of a matrix read to choose w2's scale, and for the report, see `row_step`
SWEEPS = 2  # of coordinate_descent.py after GPTQ; a third would lower the loss by less than 1 %


def solve_batch(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    input_hessian: torch.Tensor,
    of_source: Callable[[], DownHessian],
    of_rounded: Callable[[torch.Tensor, bool], DownHessian],
    settings: Experts,
) -> dict[str, torch.Tensor]:
    """Scale and round the experts of one batch.

    Args:
        gate_up, down: (c, 2I, H) and (c, H, I) in float32; gate_up multiplied by the norm's scale. Changed.
        input_hessian: (c, H, H) float32, of its inputs.
        of_source: returns the Hessians of w2's inputs as the source's w1 and w3 produce them.
        of_rounded: from rounded w1 and w3 (c, 2I, H) to the Hessians of w2's inputs, with `changes` if asked for.

    Returns:
        For each matrix `codes.…` and `scales.…` as in `LayerResult`. For each expert (c,): `damping.gate_up` and
        `damping.down`, see `rounding.gptq`; losses `…_lost`, and the squares that they are relative to `…_whole`; the
        w2 search's objective `down_search_before` and `…_after`; rows `seen` and `dropped`, see `DownHessian`.
    """
    # w2's columns are multiplied by s (c, I), and w3's rows divided by it.
    rows, searched = None, dict[str, torch.Tensor]()
    s = torch.ones_like(down[:, 0])
    early = bool(settings.awq) and settings.bits == 8  # else w3's stored scales are divided after rounding
    if early:
        s, searched = _width_scale(down, of_source(), settings)
        rows = torch.cat([torch.ones_like(s), s], 1).unsqueeze(-1)
        gate_up.div_(rows)
    # gate and up read the same inputs, so they share one factorization.
    with phase("rounding"):
        codes, scales, numbers = _round(gate_up, input_hessian, settings, "gate_up", rows)
    rounded = dequantize(codes, scales)
    inputs = of_rounded(rounded if rows is None else rounded.mul_(rows), settings.rounding == "gptq")
    del rounded
    if inputs.changes is not None:
        with phase("rounding"):
            down = corrected(down, inputs.hessian, inputs.changes)
    gate_codes, up_codes = codes.chunk(2, dim=1)
    gate_scales, up_scales = scales.chunk(2, dim=1)
    if settings.awq and not early:
        s, searched = _width_scale(down, inputs, settings)
        # w3's codes stay as they are. (Its scales are rounded to bfloat16 once more, by far less than the codes were.)
        up_scales = divided(up_scales, up_codes, s)
    down_hessian = inputs.hessian
    if settings.awq:
        down.mul_(s.unsqueeze(1))
        fold_hessian(down_hessian, s)
    with phase("rounding"):
        down_codes, down_scales, down_numbers = _round(down, down_hessian, settings, "down")
    codes_of = zip(MATRICES, (gate_codes, up_codes, down_codes), strict=True)
    scales_of = zip(MATRICES, (gate_scales, up_scales, down_scales), strict=True)
    return (
        {f"codes.{matrix}": values for matrix, values in codes_of}
        | {f"scales.{matrix}": values for matrix, values in scales_of}
        | {**numbers, **searched, **down_numbers, "seen": inputs.seen, "dropped": inputs.dropped}
    )


def _width_scale(
    down: torch.Tensor, inputs: DownHessian, settings: Experts
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A scale (c, I) for each expert between w3 and w2, and its objective (c,) before and after."""
    assert isinstance(settings.awq, Awq)
    with phase("search"):
        means = weight_means(down, settings.group_size)
        grid = grid_scales(inputs.mean, means, settings.awq.grid, settings.awq.duo_scaling)
        step = row_step(down.shape[1], SEARCH_ROWS)
        losses = scale_losses(down[:, ::step], inputs.hessian, grid, settings.group_size, settings.bits)  # (P, c)
        losses *= step
        best = losses.argmin(0)
        chosen = grid[best, torch.arange(len(best), device=best.device)]
        after = losses.gather(0, best.unsqueeze(0))[0].double()
        return chosen, {"down_search_before": losses[0].double(), "down_search_after": after}


def _round(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    settings: Experts,
    name: str,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Codes int8 and scales bfloat16 of (c, R, C) matrices whose inputs have Hessian (c, C, C), and their numbers.

    The numbers are those of `solve_batch` under `name`. Losses are those of the rows before they were divided by `rows`
    (c, R, 1).
    """
    numbers: dict[str, torch.Tensor] = {}
    weight = weight.mT.contiguous().mT  # columns are contiguous from here on
    if settings.scales == "mse":
        scale = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), settings.group_size, settings.bits)
    else:
        scale = minmax_scales(weight, settings.group_size, settings.bits)
    if settings.rounding == "gptq":
        codes, used = gptq(weight, hessian, scale, settings.bits)
        numbers[f"damping.{name}"] = used
        solvable = torch.isfinite(used)[:, None, None]  # the others were rounded to nearest, and stay so
        refined = refine(weight, damped(hessian, used), codes, scale, settings.bits, sweeps=SWEEPS)
        codes, scale = torch.where(solvable, refined[0], codes), torch.where(solvable, refined[1], scale)
    else:
        codes = nearest(weight, scale, settings.bits)
    step = row_step(weight.shape[1], REPORTED_ROWS)
    whole = weight[:, ::step]
    lost = dequantize(codes[:, ::step], scale[:, ::step]).sub_(whole)
    if rows is not None:
        lost, whole = lost.mul_(rows[:, ::step]), whole * rows[:, ::step]
    numbers[f"{name}_lost"] = row_losses(lost, hessian).sum(-1).double() * step
    numbers[f"{name}_whole"] = row_losses(whole, hessian).sum(-1).double() * step
    return codes, scale, numbers


def corrected(down: torch.Tensor, hessian: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """w2 corrected for the inputs that the rounded w1 and w3 give it, (c, H, I) float32; w2 where there is no solution.

    Rounding w1 and w3 changes w2's input from h + d to h. The matrix that comes closest to w2 (h + d) when it reads h
    instead is a ridge regression towards w2,

        w2* = w2 + w2 (Σ d hᵀ) (Σ h hᵀ + λ I)⁻¹.

    λ is DAMPING times the Hessian's mean diagonal. Tokens are weighted as in all Hessians, but Σ d hᵀ runs only over
    those that the router sends to the expert: only their error reaches the model's output.

    Args:
        down: (c, H, I) float32, w2.
        hessian: Σ h hᵀ (c, I, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, see `down_hessian.DownHessian`.
    """
    lower, info = torch.linalg.cholesky_ex(damped(hessian, torch.full_like(hessian[:, 0, 0], DAMPING)))
    step = torch.cholesky_solve((down @ changes).mT, lower).mT
    solved = (info == 0) & torch.isfinite(torch.linalg.vector_norm(step, torch.inf, dim=(-2, -1)))
    return step.masked_fill_(~solved[:, None, None], 0).add_(down)
