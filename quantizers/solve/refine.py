"""After GPTQ: every group's scale and codes once more, given all the others.

Legend: E experts, R rows, C columns, g group size, n = C / g groups, G the columns' Gram matrix.

GPTQ decides each column once, with scales fixed beforehand. With P = (W − Ŵ) G at hand, the loss
tr((W − Ŵ) G (W − Ŵ)ᵀ) is a parabola in a single group's scale, and in a single code, so each can be
set to its best value in turn: block coordinate descent, by which the loss never rises. P is kept
current by one matmul a group, so a sweep costs what GPTQ itself costs.
"""

from __future__ import annotations

import torch

from quantizers.forward.codes import code_range, dequantize


def refine(
    weight: torch.Tensor, gram: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sweep over all groups of columns.

    Args:
        weight: (E, R, C) float32.
        gram: (E, C, C) float32, damped, so that its diagonal is positive.
        codes: (E, R, C) float32 holding whole numbers.
        scale: (E, R, n) bfloat16.

    Returns:
        Codes and scales of the same shapes and dtypes; scales stay positive and rounded to bfloat16.
    """
    group = codes.shape[-1] // scale.shape[-1]
    slope = (gram @ (weight - dequantize(codes, scale)).mT).contiguous()  # Pᵀ (E, C, R): a column lies in one piece
    new_codes, new_scale = codes.mT.contiguous(), scale.mT.contiguous()  # (E, C, R), (E, n, R)
    for number in range(scale.shape[-1]):
        start, end = number * group, (number + 1) * group
        block, part = gram[:, start:end, start:end], new_codes[:, start:end]
        before = part * new_scale[:, number, None].float()
        near = _set_scale(part, new_scale[:, number], block, slope[:, start:end])
        _set_codes(part, new_scale[:, number].float(), block, near, bits)
        if end < gram.shape[-1]:
            change = before.sub_(part * new_scale[:, number, None].float())
            slope[:, end:] += gram[:, end:, start:end] @ change
    return new_codes.mT.contiguous(), new_scale.mT.contiguous()


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
        codes[:, j] += change
        slope[:, j + 1 :].addcmul_(block[:, j + 1 :, j, None], change.mul_(scale).unsqueeze(1), value=-1)
