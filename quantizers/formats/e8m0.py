"""Scales in E8M0, as the formats of the OCP's MX specification have them: a power of two in a byte b, 2^(b - 127).

255 is NaN, and 0 is 2^-127, which float32 has as a denormal number. Files have them as F8_E8M0 (DeepSeek-V4) or U8
(compressed-tensors, ModelOpt, MiniMax-M3). Both are the same bytes, but a server that copies a scale into a parameter
of the other dtype converts its numbers, so that it must be written in the dtype that is loaded: U8 for MXFP8 and MXFP4,
F8_E8M0 for FP8 in blocks, whose parameters are float32. (transformers 5.17 reads these; 5.24 does not, where it
dequantizes a model of compressed-tensors: it multiplies in the scale's own dtype, and loads wrong numbers.)

E4M3's and E2M1's numbers times any of these powers are float32 exactly, but for those that overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import CheckpointError

if TYPE_CHECKING:
    import torch

E8M0 = "F8_E8M0"  # as safetensors spells float8_e8m0fnu
BYTES = "U8"
DTYPES = (E8M0, BYTES)
NAN = 255
GROUP = 32  # weights that share a scale in MXFP8 and MXFP4


def numbers(scale: torch.Tensor) -> torch.Tensor:
    """A scale in float32, whether it is in E8M0 or stored as numbers."""
    import torch

    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def refuse_nan(checkpoint: Checkpoint, name: str) -> None:
    """Raise a CheckpointError if a scale in E8M0 holds a NaN, and name it."""
    import torch

    info = checkpoint.tensors[name]
    if info.dtype in DTYPES and bool((checkpoint.tensor(name).view(torch.uint8) == NAN).any()):
        raise CheckpointError(info.file, f"{name} holds a NaN (E8M0's byte 255)", "download this shard again")
