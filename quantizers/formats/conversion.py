"""Conversion of linear modules that are not routed experts, by formulas that `verify` applies again.

    bf16         of FP8: float32(q) * scale, rounded once to bfloat16
    fp8          to FP8 with a scale per row
    fp8-block    to FP8 with a scale per block of 128 x 128, a power of two

fp8.py has how these scales are found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quantizers.checkpoint.reader import Checkpoint

from .dequantization import read_weight
from .format import SCALE
from .fp8 import BLOCKS, ROWS, Fp8
from .plain import BF16, Plain

if TYPE_CHECKING:
    import torch

# What linear modules become, by the recipe's `attention`.
CONVERSIONS: Mapping[str, Fp8 | Plain] = {"bf16": BF16, "fp8": ROWS, "fp8-block": BLOCKS}


def converted(source: Checkpoint, module: str, to: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a linear module after its conversion, by name, on `device`; see CONVERSIONS.

    Raises:
        CheckpointError: the source's weight cannot be read, or is not finite.
    """
    weight, form = read_weight(source, module, device), CONVERSIONS[to]
    if isinstance(form, Plain):
        return {f"{module}.weight": weight.bfloat16()}
    codes, scale = form.quantized(weight)
    return {f"{module}.weight": codes, f"{module}.{SCALE}": scale}
