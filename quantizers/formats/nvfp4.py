"""NVFP4 in compressed-tensors' `nvfp4-pack-quantized` layout: E2M1 codes, E4M3 scales of 16, one float32 scale.

    weight_packed        U8 (R, C / 2)        two codes a byte, the even column in the low half
    weight_scale         F8_E4M3 (R, C / 16)
    weight_global_scale  F32 (1,)             448 · 6 / max|W|, a divisor: weight = code · weight_scale / it
    input_global_scale   F32 (1,)             448 · 6 / max|x|, where a server also quantizes activations

gate and up (w1 and w3) of an expert have the same global scales: servers multiply both in one matrix.
"""

from __future__ import annotations

import torch

GROUP = 16
LARGEST_E2M1, LARGEST_E4M3, SMALLEST_E4M3 = 6.0, 448.0, 2.0**-9


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """The global scale of what has this largest magnitude (…) float32; 1 where that is zero, as compressed-tensors."""
    scale = LARGEST_E4M3 * LARGEST_E2M1 / largest.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(scale), scale, 1)


def nearest_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """The nearest positive E4M3 number."""
    return scale.clamp(SMALLEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


def nearest_e2m1_(x: torch.Tensor) -> torch.Tensor:
    """Round to E2M1, ties to the even code, in place; what is beyond its largest becomes that."""
    size = x.clamp_(-LARGEST_E2M1, LARGEST_E2M1).abs()  # numbers are ½, 1 and 2 apart
    step = (size >= 2).to(x.dtype).add_(1).add_(size >= 4, alpha=2).div_(2)
    return x.div_(step).round_().mul_(step)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack (…, C) int8, twice E2M1's values, into uint8 (…, C / 2)."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8

    packed: torch.Tensor = pack_fp4_to_uint8(codes.flatten(0, -2).bfloat16().div_(2))
    return packed.view(*codes.shape[:-1], -1)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """E2M1's values (R, C) float32 of uint8 (R, C / 2)."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = packed.shape
    values: torch.Tensor = unpack_fp4_from_uint8(packed, rows, 2 * half, torch.float32)
    return values
