"""After GPTQ: every group's scale and codes once more, given all the others.

Legend: E experts, R rows, C columns, g group size, n = C / g groups, G the columns' Gram matrix.

GPTQ decides each column once, with scales fixed beforehand. With P = (W − Ŵ) G at hand, the loss
tr((W − Ŵ) G (W − Ŵ)ᵀ) is a parabola in a single group's scale, and in a single code, so each can be
set to its best value in turn: block coordinate descent, by which the loss never rises. P is kept
current by one matmul a group, so a sweep costs what GPTQ itself costs.
"""

from __future__ import annotations

import torch

from .rounding import code_range, dequantize


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
    codes, scale = codes.clone(), scale.clone()
    slope = (weight - dequantize(codes, scale)) @ gram  # P (E, R, C)
    for number in range(scale.shape[-1]):
        columns = slice(number * group, (number + 1) * group)
        block = gram[:, columns, columns]
        before = codes[:, :, columns] * scale[:, :, number, None].float()
        new_scale, near = _best_scale(codes[:, :, columns], scale[:, :, number], block, slope[:, :, columns])
        new_codes = _best_codes(codes[:, :, columns], new_scale.float(), block, near, bits)
        codes[:, :, columns], scale[:, :, number] = new_codes, new_scale
        slope -= (new_codes * new_scale.unsqueeze(-1).float() - before) @ gram[:, columns]
    return codes, scale


def _best_scale(
    codes: torch.Tensor, scale: torch.Tensor, block: torch.Tensor, slope: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale (E, R) that is best for the group's codes (E, R, g), and the group's P under it."""
    image = codes @ block
    curvature, gradient = (image * codes).sum(-1), (slope * codes).sum(-1)
    wanted = scale.float() + gradient / curvature.clamp(min=torch.finfo(torch.float32).tiny)
    rounded = wanted.bfloat16()
    step = rounded.float() - scale.float()
    # Rounded to bfloat16 the step may overshoot: take it only where the parabola is lower there.
    better = (2 * gradient - step * curvature) * step > 0
    better &= (rounded > 0) & torch.isfinite(rounded)
    step = torch.where(better, step, torch.zeros_like(step))
    return torch.where(better, rounded, scale), slope - step.unsqueeze(-1) * image


def _best_codes(
    codes: torch.Tensor, scale: torch.Tensor, block: torch.Tensor, slope: torch.Tensor, bits: int
) -> torch.Tensor:
    """The group's codes (E, R, g), column by column, each the best given all the others."""
    low, high = code_range(bits)
    codes, slope = codes.clone(), slope.clone()
    for j in range(codes.shape[-1]):
        ideal = codes[:, :, j] + slope[:, :, j] / block[:, j, j, None] / scale
        code = torch.clamp(torch.round(ideal), low, high)
        slope -= ((code - codes[:, :, j]) * scale).unsqueeze(-1) * block[:, j, None]
        codes[:, :, j] = code
    return codes
