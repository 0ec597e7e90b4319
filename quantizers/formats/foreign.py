"""Formats of other programs, beside those of AutoAWQ and GPTQ: a matrix is read as a whole.

    packed integers with zero points                    weight_packed, weight_scale, weight_shape, weight_zero_point
    integers with a scale per tensor, row or group      weight I8, weight_scale (, weight_zero_point I8)
    FP8 with a scale per tensor, group or other block   weight F8_E4M3, weight_scale
    numbers that are no matrix, or in float64           weight

Legend: R rows (outputs), C columns (inputs), n groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TensorInfo
from quantizers.system.errors import CheckpointError

from .format import PACKED, SCALE, ForeignFormat
from .fp8 import Fp8Rows, block_size, blocks_of
from .packed_integers import ZERO_POINT, Integers, packed_parts
from .plain import Plain

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ZeroPoints(ForeignFormat):
    """Packed integers with zero points (R, n), which are packed along the rows: (code - zero) * scale."""

    kind: ClassVar[str] = Integers.kind
    description: ClassVar[str] = Integers.description

    def read(self, checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
        """The weight (R, C) float32."""
        import torch
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        parts, (rows, columns), bits = packed_parts(checkpoint, module)
        packed, scale, zero = (checkpoint.tensor(info.name).to(device) for info in parts)
        groups = scale.shape[1]
        codes = unpack_from_int32(packed, bits, torch.Size((rows, columns))).float()
        zeros = unpack_from_int32(zero, bits, torch.Size((rows, groups)), packed_dim=0).float()
        shifted = codes.view(rows, groups, -1) - zeros.unsqueeze(-1)
        weight: torch.Tensor = (shifted * scale.float().unsqueeze(-1)).view(rows, columns)
        return weight


@dataclass(frozen=True)
class ScaledBytes(ForeignFormat):
    """Integers in bytes, with scales and zero points for the whole matrix, rows, groups or blocks."""

    kind: ClassVar[str] = Integers.kind
    description: ClassVar[str] = Integers.description

    def read(self, checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
        """The weight (R, C) float32; a CheckpointError for a weight that cannot be read at all."""
        info = checkpoint.tensors[f"{module}.weight"]
        scale, zero = (checkpoint.tensors.get(f"{module}.{name}") for name in (SCALE, ZERO_POINT))
        if info.dtype not in ("I8", FP8) or scale is None or len(info.shape) != 2:
            raise CheckpointError(
                f"{info.file}: {info.name}",
                f"{info.dtype} {list(info.shape)}{'' if scale else f' without {SCALE}'} is no weight that can be read",
                "give the published checkpoint",
            )
        codes = checkpoint.tensor(info.name).to(device).float()
        if zero is not None:
            codes -= _spread(checkpoint, zero, info, device)
        return codes.mul_(_spread(checkpoint, scale, info, device))


@dataclass(frozen=True)
class ScaledFp8(ScaledBytes):
    """FP8 with a scale for the whole matrix, groups, or blocks of another size than config.json declares."""

    kind: ClassVar[str] = Fp8Rows.kind
    description: ClassVar[str] = Fp8Rows.description


@dataclass(frozen=True)
class Numbers(ForeignFormat):
    """Numbers that are no matrix, or in float64."""

    kind: ClassVar[str] = Plain.kind
    description: ClassVar[str] = Plain.description

    def read(self, checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
        """The weight in float32."""
        return checkpoint.tensor(f"{module}.weight").to(device).float()


PLAIN = (*FLOATING, "F64")


def foreign_format(checkpoint: Checkpoint, module: str) -> ForeignFormat:
    """The format of a module's weight that is stored in none of which rows can be read."""
    if f"{module}.{PACKED}" in checkpoint.tensors:
        return ZeroPoints()
    dtype = checkpoint.tensors[f"{module}.weight"].dtype
    if dtype in PLAIN:
        return Numbers()
    return ScaledFp8() if dtype == FP8 else ScaledBytes()


def _spread(checkpoint: Checkpoint, scale: TensorInfo, weight: TensorInfo, device: torch.device) -> torch.Tensor:
    """A scale or zero point in float32, expanded so that it broadcasts to the weight's shape (R, C)."""
    rows, columns = weight.shape
    values = checkpoint.tensor(scale.name).to(device).float()
    if values.numel() == 1:
        return values.view(1, 1)
    if scale.shape in ((rows,), (rows, 1)):
        return values.view(rows, 1)
    if len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        return values.repeat_interleave(columns // scale.shape[1], dim=1)
    rows_of, columns_of = block = block_size(checkpoint)
    if scale.shape == blocks_of(weight.shape, block):
        return values.repeat_interleave(rows_of, dim=0)[:rows].repeat_interleave(columns_of, dim=1)[:, :columns]
    raise CheckpointError(
        scale.file,
        f"{scale.name} has shape {list(scale.shape)}",
        f"one number, or one per row, group or declared block of {list(weight.shape)} is needed",
    )
