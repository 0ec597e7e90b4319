"""After GPTQ: every group's scale and codes once more, given all the others.

Legend: E experts, R rows, C columns, g group size, n = C / g groups, G the columns' Gram matrix.

GPTQ decides each column once, with scales fixed beforehand. With P = (W − Ŵ) G at hand, the loss
tr((W − Ŵ) G (W − Ŵ)ᵀ) is a parabola in a single group's scale, and in a single code, so each can be
set to its best value in turn: block coordinate descent, by which the loss never rises. P is kept
current by one matmul a group within a panel of columns, and one a panel for those after it, so a sweep costs what
GPTQ itself costs.
"""

from __future__ import annotations

import torch

from quantizers.forward.codes import code_range

PANEL = 256  # columns, rounded down to whole groups


def refine(
    weight: torch.Tensor, gram: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bits: int, *, sweeps: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sweeps over all groups of columns.

    Args:
        weight: (E, R, C) float32.
        gram: (E, C, C) float32, damped, so that its diagonal is positive.
        codes: (E, R, C) float32 holding whole numbers.
        scale: (E, R, n) bfloat16.

    Returns:
        Codes and scales of the same shapes and dtypes; scales stay positive and rounded to bfloat16.
    """
    # Everything is transposed, (E, C, R) and (E, n, R): a column lies in one piece.
    codes, scale = (tensor.mT.clone(memory_format=torch.contiguous_format) for tensor in (codes, scale))
    slope, change = torch.empty_like(codes), torch.empty_like(codes)
    for _ in range(sweeps):
        step = scale.float().unsqueeze(2)  # (E, n, 1, R)
        by_group = len(codes), step.shape[1], -1, codes.shape[2]  # (E, n, g, R)
        torch.mul(codes.view(by_group), step, out=change.view(by_group))
        torch.bmm(gram, torch.sub(weight.mT, change, out=change), out=slope)  # Pᵀ
        _sweep(gram, codes, scale, slope, change, bits=bits)
    return codes.mT.contiguous(), scale.mT.contiguous()


def _sweep(
    gram: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    slope: torch.Tensor,
    change: torch.Tensor,
    *,
    bits: int,
) -> None:
    """Set all codes (E, C, R) and scales (E, n, R), given Pᵀ (E, C, R); `change`, of that shape, is overwritten."""
    columns = codes.shape[1]
    group = columns // scale.shape[1]
    panel = max(1, PANEL // group) * group
    for first in range(0, columns, panel):
        last = min(first + panel, columns)
        for start in range(first, last, group):
            end, number = start + group, start // group
            block, part, moved = gram[:, start:end, start:end], codes[:, start:end], change[:, start:end]
            torch.mul(part, scale[:, number, None].float(), out=moved)
            near = _set_scale(part, scale[:, number], block, slope[:, start:end])
            step = scale[:, number].float()
            _set_codes(part, step, block, near, bits)
            moved.addcmul_(part, step.unsqueeze(1), value=-1)
            if end < last:
                slope[:, end:last].baddbmm_(gram[:, end:last, start:end], moved)
        if last < columns:
            slope[:, last:].baddbmm_(gram[:, last:, first:last], change[:, first:last])


def _set_scale(codes: torch.Tensor, scale: torch.Tensor, block: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Set the scale (E, R) to what is best for the group's codes (E, g, R); returns the group's Pᵀ under it."""
    image = block @ codes
    curvature, gradient = (image * codes).sum(1), (slope * codes).sum(1)
    wanted = scale.float() + gradient / curvature.clamp(min=torch.finfo(torch.float32).tiny)
    rounded = wanted.bfloat16()
    step = rounded.float() - scale.float()
    # Rounded to bfloat16 the step may overshoot: take it only where the parabola is lower there.
    better = (2 * gradient - step * curvature) * step > 0
    better &= (rounded > 0) & torch.isfinite(rounded)
    scale.copy_(torch.where(better, rounded, scale))
    return slope - image.mul_(torch.where(better, step, torch.zeros_like(step)).unsqueeze(1))


def _set_codes(codes: torch.Tensor, scale: torch.Tensor, block: torch.Tensor, slope: torch.Tensor, bits: int) -> None:
    """Set the group's codes (E, g, R), column by column, each to the best given all the others."""
    low, high = code_range(bits)
    inverse = 1 / block.diagonal(dim1=-2, dim2=-1)  # (E, g)
    for j in range(codes.shape[1]):
        ideal = (slope[:, j] * inverse[:, j, None]).div_(scale).add_(codes[:, j])
        change = ideal.round_().clamp_(low, high) - codes[:, j]
        codes[:, j] = ideal
        slope[:, j + 1 :].addcmul_(block[:, j + 1 :, j, None], change.mul_(scale).unsqueeze(1), value=-1)
