"""Conversion of linear modules that are not routed experts, by formulas that `verify` applies again.

    bf16         of FP8: float32(q) * scale, rounded once to bfloat16
    fp8          to FP8 with a scale per row
    fp8-block    to FP8 with a scale per block of 128 x 128, a power of two

No scale clips a weight. Of STEPS scales within a factor of two, that of a row is the one with the least squared error,
which lowers the relative error of normally distributed weights from 0.0265 to 0.0257. A block's is a power of two, as
vLLM's DeepGEMM makes it one on loading (`requant_weight_ue8m0_inplace`): any other scale rounds the weights once more,
to 0.037; and of two powers of two, the larger one only loses more of the smallest weights.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantizers.checkpoint.reader import Checkpoint
from quantizers.recipe.schema import Attention

from .dequantization import read_weight
from .fp8 import CONVERTED_BLOCK, SCALE

LARGEST, STEPS = 448.0, 16


def converted(source: Checkpoint, module: str, to: Attention, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a linear module after its conversion, by name, on `device`; see `converted_specs`.

    Raises:
        CheckpointError: the source's weight cannot be read, or is not finite.
    """
    weight = read_weight(source, module, device)
    if to == "bf16":
        return {f"{module}.weight": weight.to(torch.bfloat16)}
    codes, scale = fp8_rows(weight) if to == "fp8" else fp8_blocks(weight)
    return {f"{module}.weight": codes, f"{module}.{SCALE}": scale}


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (R, C) float32 as codes F8_E4M3 (R, C) and a scale (R, 1) float32 of each row, by least squares."""
    least = _least_scale(weight.abs().amax(1, keepdim=True))
    scales = torch.stack([least * 2 ** (step / STEPS) for step in range(STEPS)])  # (STEPS, R, 1)
    lost = torch.stack([(_codes(weight, s).float() * s - weight).double().square().sum(1) for s in scales])
    scale = scales.gather(0, lost.argmin(0)[None, :, None])[0]
    return _codes(weight, scale), scale


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (R, C) float32 as codes F8_E4M3 (R, C) and float32 scales (⌈R / 128⌉, ⌈C / 128⌉), powers of two."""
    (rows, columns), (height, width) = weight.shape, CONVERTED_BLOCK
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # (⌈R / 128⌉, 128, ⌈C / 128⌉, 128)
    mantissa, exponent = torch.frexp(_least_scale(blocks.abs().amax((1, 3), keepdim=True)))
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())  # at or above the least
    codes = _codes(blocks, scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.contiguous(), scale[:, 0, :, 0].contiguous()


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale rounded to FP8 (E4M3), what is beyond its largest number to that, times the scale again; float32."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def _least_scale(peak: Tensor) -> Tensor:
    """The smallest scale that clips nothing, for the largest magnitude; 1 where that is 0."""
    return torch.where(peak > 0, peak / LARGEST, 1.0).clamp(min=torch.finfo(torch.float32).tiny)


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).to(torch.float8_e4m3fn)
