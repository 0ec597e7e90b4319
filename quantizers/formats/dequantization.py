"""Dequantization of a linear module's weight, from every supported format, to float32.

Formats of which any rows can be dequantized (`WeightFormat`):

    blocks    weight F8_E4M3 (R, C), weight_scale_inv or weight_scale (⌈R / b⌉, ⌈C / b'⌉)   blocks b x b'
    rows      weight F8_E4M3 (R, C), weight_scale (R,) or (R, 1)
    packed    weight_packed I32 (R, C · bits / 32), weight_scale (R, n), weight_shape
    nvfp4     weight_packed U8 (R, C / 2), weight_scale F8_E4M3 (R, C / 16), weight_global_scale F32 (1,)
    plain     weight BF16, F16 or F32 (R, C)

Of other programs, as a whole:

    integers with a scale per tensor, row or group      weight I8, weight_scale (, weight_zero_point I8)
    FP8 with a scale per tensor, group or other block   weight F8_E4M3, weight_scale
    packed integers with zero points                    weight_packed, weight_scale, weight_shape, weight_zero_point
    integers of AutoAWQ, GPTQ and AutoRound             see awq_gptq.py

compressed-tensors' pack-quantized, nvfp4-pack-quantized, int-quantized, float-quantized and naive-quantized are among
these. Other formats are refused in unsupported.py.

Legend: R rows (outputs), C columns (inputs), n groups of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TensorInfo
from quantizers.system.errors import CheckpointError

from . import nvfp4
from .awq_gptq import dequantize_awq_gptq
from .fp8 import GLOBAL_SCALE, SCALE, SCALE_INV, block_size, blocks_of, weight_schemes
from .packed_integers import dequantize, unpack

PLAIN = (*FLOATING, "F64")
PACKED, ZERO_POINT, GROUP_INDEX = "weight_packed", "weight_zero_point", "weight_g_idx"


def read_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Read the weight (R, C) of a linear module, of this full published name, as float32 on `device`.

    Raises:
        CheckpointError: a tensor is missing, has a wrong dtype or shape, or contains NaN or infinity.
    """
    weight = unchecked_weight(checkpoint, module, device)
    if not bool(is_finite(weight)):
        raise CheckpointError(
            f"{checkpoint.folder}: {module}.weight or its scale holds a NaN or infinity; download its shard again"
        )
    return weight


def unchecked_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """As `read_weight`, but numbers that are not finite are left in."""
    stored = weight_format(checkpoint, module)
    if stored is not None:
        parts = [checkpoint.tensor(f"{module}.{part}").to(device) for part in stored.parts]
        return stored.numbers(parts).float()
    if f"{module}.qweight" in checkpoint.tensors:
        return dequantize_awq_gptq(checkpoint, module, device)
    if f"{module}.{PACKED}" in checkpoint.tensors:
        return _with_zero_points(checkpoint, module, device)
    info = checkpoint.tensors[f"{module}.weight"]
    scale = checkpoint.tensors.get(f"{module}.{SCALE}")
    if info.dtype in PLAIN:
        return checkpoint.tensor(info.name).to(device).float()
    if info.dtype not in ("I8", FP8) or scale is None or len(info.shape) != 2:
        raise CheckpointError(
            f"{info.file}: {info.name}: {info.dtype} {list(info.shape)} is no weight that can be read; give the "
            "published checkpoint"
        )
    codes = checkpoint.tensor(info.name).to(device).float()
    zero = checkpoint.tensors.get(f"{module}.{ZERO_POINT}")
    if zero is not None:
        codes -= _spread(checkpoint, zero, info, device)
    return codes.mul_(_spread(checkpoint, scale, info, device))


def refuse_bias(checkpoint: Checkpoint, module: str) -> None:
    """Refuse a bias that the family's model would not add. AutoGPTQ writes one of zeros beside every weight."""
    info = checkpoint.tensors.get(f"{module}.bias")
    if info is not None and bool(checkpoint.tensor(info.name).any()):
        raise CheckpointError(
            f"{info.file}: {info.name} is not zero, but this family's model adds no bias there; the checkpoint is of "
            "another model, or was made with a correction that cannot be read here"
        )


@dataclass(frozen=True)
class WeightFormat:
    """How a matrix (R, C) is stored, see above."""

    kind: Literal["blocks", "rows", "packed", "nvfp4", "plain"]
    parts: tuple[str, ...]  # the last names of the tensors with the matrix's rows, the quantized numbers first
    shape: tuple[int, int]
    block: tuple[int, int] = (1, 1)  # of FP8 in blocks

    def band(self, parts: Sequence[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
        """The parts of rows `first` to `last`, both multiples of the block's rows or the matrix's end."""
        step = self.block[0]
        scales = [scale[first // step : math.ceil(last / step)] for scale in parts[1:2]]
        return [parts[0][first:last], *scales, *parts[2:]]  # NVFP4's third belongs to the whole matrix

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows (r, C) from their parts, on the parts' device: a product in float32, or a plain weight as it is."""
        if self.kind == "plain":
            return parts[0]
        if self.kind == "nvfp4":
            return dequantize(nvfp4.unpack(parts[0]), parts[1].float() / parts[2])
        quantized, scale = parts
        if self.kind == "blocks":
            return dequantize_fp8(quantized, scale, self.block)
        if self.kind == "rows":
            return quantized.float().mul_(scale.float().view(-1, 1))
        columns = self.shape[1]
        bits = quantized.shape[1] * 32 // columns
        return dequantize(unpack(quantized, bits, (len(quantized), columns)), scale)


def weight_format(checkpoint: Checkpoint, module: str) -> WeightFormat | None:
    """The format of a module's matrix, from headers; None for a vector or another program's.

    Raises:
        CheckpointError: the weight is missing, or its tensors do not belong together.
    """
    tensors = checkpoint.tensors
    if f"{module}.qweight" in tensors:
        return None
    if f"{module}.{PACKED}" in tensors:
        if tensors[f"{module}.{PACKED}"].dtype == "U8":
            return _nvfp4(checkpoint, module)
        parts, shape, _ = _packed(checkpoint, module)
        return None if len(parts) > 2 else WeightFormat("packed", (PACKED, SCALE), shape)
    info = checkpoint.require(f"{module}.weight", "a linear layer's weight")
    if len(info.shape) != 2:
        return None
    shape = (info.shape[0], info.shape[1])
    if info.dtype in FLOATING:
        return WeightFormat("plain", ("weight",), shape)
    if info.dtype != FP8:
        return None
    inverse, scale = (tensors.get(f"{module}.{name}") for name in (SCALE_INV, SCALE))
    block = block_size(checkpoint)
    expected = blocks_of(shape, block)
    if scale is not None and scale.shape != expected:
        return WeightFormat("rows", ("weight", SCALE), shape) if scale.shape in (shape[:1], (shape[0], 1)) else None
    stored = inverse or scale
    if stored is None:
        raise CheckpointError(
            f"{info.file}: {info.name} is FP8 but has no {SCALE_INV}; the checkpoint is incomplete, download it again"
        )
    if stored.shape != expected:
        raise CheckpointError(
            f"{stored.file}: {stored.name} has shape {list(stored.shape)}, but {list(shape)} in blocks of "
            f"{list(block)} needs {list(expected)}"
        )
    return WeightFormat("blocks", ("weight", stored.name.rpartition(".")[2]), shape, block)


def _nvfp4(checkpoint: Checkpoint, module: str) -> WeightFormat:
    """The format of E2M1 codes with E4M3 scales, from headers."""
    names = (PACKED, SCALE, GLOBAL_SCALE)
    packed, scale, whole = (checkpoint.require(f"{module}.{name}", "part of an NVFP4 weight") for name in names)
    rows, columns = (packed.shape[0], 2 * packed.shape[1]) if len(packed.shape) == 2 else (0, 0)
    stored = [(info.dtype, info.shape) for info in (scale, whole)]
    if not rows or stored != [(FP8, (rows, columns // nvfp4.GROUP)), ("F32", (1,))] or columns % nvfp4.GROUP:
        raise CheckpointError(
            f"{packed.file}: {module}: weight_packed U8 {list(packed.shape)}, weight_scale {scale.dtype} "
            f"{list(scale.shape)} and {GLOBAL_SCALE} {whole.dtype} {list(whole.shape)} are no NVFP4 weight"
        )
    return WeightFormat("nvfp4", names, (rows, columns))


def _packed(checkpoint: Checkpoint, module: str) -> tuple[list[TensorInfo], tuple[int, int], int]:
    """The header entries of packed integers, scales and zero points if there are any; R and C; bits."""
    names = (PACKED, SCALE, "weight_shape")
    packed, scale, stated = (checkpoint.require(f"{module}.{name}", "part of a packed weight") for name in names)
    zero, index = (checkpoint.tensors.get(f"{module}.{part}") for part in (ZERO_POINT, GROUP_INDEX))
    symmetric = all(weights.get("symmetric", True) for weights in weight_schemes(checkpoint.config))
    unread = index or (zero if symmetric else None)
    if unread is not None:
        raise CheckpointError(
            f"{packed.file}: {unread.name}: only groups in order of columns can be read, and zero points that "
            "config.json declares (symmetric: false)"
        )
    two = math.prod(stated.shape) == 2
    rows, columns = (int(n) for n in checkpoint.tensor(stated.name).flatten().tolist()) if two else (0, 0)
    bits, groups = packed.shape[-1] * 32 // columns if packed.shape and columns > 0 else 0, (0, *scale.shape)[-1]
    parts = [packed, scale] if zero is None else [packed, scale, zero]
    shapes = [(rows, columns * bits // 32), (rows, groups), (math.ceil(rows * bits / 32), groups)][: len(parts)]
    whole = 2 <= bits <= 8 and groups > 0 and columns % groups == columns * bits % 32 == 0
    integers = all(info.dtype == "I32" for info in parts if info is not scale)
    if not whole or not integers or [info.shape for info in parts] != shapes:
        stored = ", ".join(f"{info.name.rpartition('.')[2]} {info.dtype} {list(info.shape)}" for info in parts)
        raise CheckpointError(
            f"{packed.file}: {module}: {stored} and weight_shape {[rows, columns]} do not belong together"
        )
    return parts, (rows, columns), bits


def _with_zero_points(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Dequantize packed integers as (code - zero) * scale. The zero points (R, n) are packed along the rows."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    parts, (rows, columns), bits = _packed(checkpoint, module)
    packed, scale, zero = (checkpoint.tensor(info.name).to(device) for info in parts)
    groups = scale.shape[1]
    codes = unpack_from_int32(packed, bits, torch.Size((rows, columns))).float()
    zeros = unpack_from_int32(zero, bits, torch.Size((rows, groups)), packed_dim=0).float()
    shifted = codes.view(rows, groups, -1) - zeros.unsqueeze(-1)
    weight: torch.Tensor = (shifted * scale.float().unsqueeze(-1)).view(rows, columns)
    return weight


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
        f"{scale.file}: {scale.name} has shape {list(scale.shape)}; one number, or one per row, group or declared "
        f"block of {list(weight.shape)} is needed"
    )


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantize FP8 as q * scale per block, in float32 on the tensors' device. weight (R, C), scale (⌈R/b⌉, ⌈C/b⌉)."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    library: Any = FP8BlockDequantizer(targets=["m"], weight_block_size=block, dtype=torch.float32)
    result: torch.Tensor = library.process({"m.weight": weight, f"m.{SCALE_INV}": scale})["m.weight"]
    return result


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers are, as a bool of no dimension on the tensor's device: nothing waits for it."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    floating = tensor.float() if tensor.element_size() == 1 else tensor
    return torch.stack(torch.aminmax(floating)).isfinite().all()  # a NaN is both; without arrays of its size
