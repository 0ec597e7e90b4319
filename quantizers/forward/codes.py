"""Integer codes with group scales, and how to dequantize them.

Legend: E experts, R rows (outputs), C columns (inputs), g group size, n = C / g groups.
"""

from __future__ import annotations

import torch


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code of a symmetric signed integer of `bits` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """View (…, R, C) as (…, R, n, g)."""
    return weight.view(*weight.shape[:-1], -1, group)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale in float32: (…, R, C) from codes (…, R, C), int8 or float32, and scales (…, R, n)."""
    view = grouped(codes, codes.shape[-1] // scale.shape[-1])
    return (view * scale.float().unsqueeze(-1)).flatten(-2)
