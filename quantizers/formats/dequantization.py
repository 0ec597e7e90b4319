"""A linear module's matrix as its tensors, in the forms that can be turned into numbers any rows at a time.

    blocks    weight F8_E4M3 (R, C), weight_scale_inv or weight_scale (R / b, ⌈C / b'⌉)   b rows of blocks b x b'
    rows      weight F8_E4M3 (R, C), weight_scale (R,) or (R, 1)
    packed    weight_packed I32 (R, C · bits / 32), weight_scale (R, n), weight_shape
    plain     weight BF16, F16 or F32 (R, C)

Headers alone say which it is. Matrices of one form can be laid one below the other and become numbers together, and a
matrix can be cut into bands of rows: the numbers are the same, bit for bit. Everything else is read by `read_weight`.

Legend: R rows (outputs), C columns (inputs), n groups of a row.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import FP8, TensorInfo
from quantizers.system.errors import CheckpointError

from .awq_gptq import dequantize_awq_gptq
from .fp8 import SCALE, SCALE_INV, block_size, blocks_of
from .packed_integers import dequantize, unpack

PLAIN = ("BF16", "F16", "F32")


def read_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Read a linear module's weight as float32 on `device`.

    Args:
        module: its full published name, without `.weight`.

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
    foreign = foreign_weight(checkpoint, module, device)
    if foreign is not None:
        return foreign
    if f"{module}.weight_packed" in checkpoint.tensors:
        return packed_weight(checkpoint, module, device)
    info = checkpoint.require(f"{module}.weight", "a linear layer's weight")
    stored = checkpoint.tensor(info.name).to(device)
    if stored.dtype == torch.float8_e4m3fn:
        scale = checkpoint.tensor(fp8_scale(checkpoint, module).name).to(device)
        return dequantize_fp8(stored, scale, block_size(checkpoint))
    if stored.is_floating_point() and stored.element_size() > 1:
        return stored.float()
    raise CheckpointError(
        f"{info.file}: {info.name}: dtype {info.dtype} is not that of a weight that can be read; give the published "
        "checkpoint"
    )


def refuse_bias(checkpoint: Checkpoint, module: str) -> None:
    """Refuse a bias that the family's model would not add. AutoGPTQ writes one of zeros beside every weight."""
    info = checkpoint.tensors.get(f"{module}.bias")
    if info is not None and bool(checkpoint.tensor(info.name).any()):
        raise CheckpointError(
            f"{info.file}: {info.name} is not zero, but this family's model adds no bias there; the checkpoint is of "
            "another model, or was made with a correction that cannot be read here"
        )


@dataclass(frozen=True)
class Form:
    """How a matrix is stored; matrices with equal ones can be laid one below the other.

    Attributes:
        kind: see above.
        parts: the last names of the tensors whose rows belong to the matrix's rows, the codes first.
        stored: dtypes and shapes of the parts.
        shape: (R, C).
        block: of FP8 in blocks; (1, 1) elsewhere.
    """

    kind: Literal["blocks", "rows", "packed", "plain"]
    parts: tuple[str, ...]
    stored: tuple[tuple[str, tuple[int, ...]], ...]
    shape: tuple[int, int]
    block: tuple[int, int] = (1, 1)

    def band(self, parts: Sequence[torch.Tensor], first: int, last: int) -> list[torch.Tensor]:
        """The parts of rows `first` to `last`, both multiples of the block's rows or the matrix's end."""
        step = self.block[0]
        return [parts[0][first:last], *(scale[first // step : last // step] for scale in parts[1:])]

    def put(self, parts: Sequence[torch.Tensor], slot: torch.Tensor) -> torch.Tensor:
        """Fill a slot with the numbers of some rows, each rounded to its dtype once.

        Args:
            parts: of these rows, on the slot's device.
            slot: (r, C), or (c, R, C) for whole matrices one below the other, each in one piece.

        Returns:
            Whether all of them are finite, a bool of no dimension on the device: nothing waits for it.
        """
        numbers = self.numbers(parts)
        slot.copy_(numbers.view(slot.shape))
        return is_finite(numbers)

    def numbers(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows (r, C) from their parts, on the parts' device: a product in float32, or a plain weight as it is."""
        if self.kind == "plain":
            return parts[0]
        codes, scale = parts
        if self.kind == "blocks":
            return dequantize_fp8(codes, scale, self.block)
        if self.kind == "rows":
            return codes.float().mul_(scale.float().view(-1, 1))
        columns = self.shape[1]
        return dequantize(unpack(codes, codes.shape[1] * 32 // columns, (len(codes), columns)), scale)


def form_of(checkpoint: Checkpoint, module: str) -> Form | None:
    """The form of a module's matrix, from headers; None where only `read_weight` knows.

    Raises:
        CheckpointError: its weight is missing, or FP8 in blocks has no scale or one of another shape.
    """
    tensors = checkpoint.tensors
    others = ("qweight", "weight_zero_point", "weight_g_idx")
    if any(f"{module}.{part}" in tensors for part in others):
        return None
    if f"{module}.weight_packed" in tensors:
        return _packed(checkpoint, module)
    info = checkpoint.require(f"{module}.weight", "a linear layer's weight")
    if len(info.shape) != 2:
        return None
    shape = (info.shape[0], info.shape[1])
    if info.dtype in PLAIN:
        return Form("plain", ("weight",), ((info.dtype, shape),), shape)
    if info.dtype != FP8:
        return None
    block, scale = block_size(checkpoint), tensors.get(f"{module}.weight_scale")
    if scale is None or scale.shape == blocks_of(shape, block):
        scale = fp8_scale(checkpoint, module)
        if shape[0] % block[0]:
            return None
        kind: Literal["blocks", "rows"] = "blocks"
    elif scale.shape in ((shape[0],), (shape[0], 1)):
        kind, block = "rows", (1, 1)
    else:
        return None
    stored = ((info.dtype, shape), (scale.dtype, scale.shape))
    return Form(kind, ("weight", scale.name.rpartition(".")[2]), stored, shape, block)


def _packed(checkpoint: Checkpoint, module: str) -> Form | None:
    found = [checkpoint.tensors.get(f"{module}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")]
    words, scale, stated = found
    if words is None or scale is None or stated is None or words.dtype != "I32" or math.prod(stated.shape) != 2:
        return None
    rows, columns = (int(n) for n in checkpoint.tensor(stated.name).flatten().tolist())
    if len(words.shape) != 2 or len(scale.shape) != 2 or columns <= 0 or not scale.shape[1]:
        return None
    whole = columns % scale.shape[1] == 0 and (words.shape[1] * 32) % columns == 0
    if not whole or words.shape[1] * 32 // columns not in (4, 8) or not rows == words.shape[0] == scale.shape[0]:
        return None
    stored = ((words.dtype, words.shape), (scale.dtype, scale.shape))
    return Form("packed", ("weight_packed", "weight_scale"), stored, (rows, columns))


def fp8_scale(checkpoint: Checkpoint, module: str) -> TensorInfo:
    """The header entry of the scale of an FP8 module in blocks: `weight_scale_inv`, as published, or `weight_scale`.

    Raises:
        CheckpointError: there is none, or weight and scale do not belong together.
    """
    weight = checkpoint.tensors[f"{module}.weight"]
    names = (f"{module}.{SCALE_INV}", f"{module}.{SCALE}")
    info = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if info is None:
        raise CheckpointError(
            f"{weight.file}: {module}.weight is FP8 but has no {SCALE_INV}; the checkpoint is incomplete, "
            "download it again"
        )
    if len(weight.shape) != 2:
        raise CheckpointError(
            f"{weight.file}: {module}.weight has shape {list(weight.shape)}; FP8 in blocks has rows and columns"
        )
    block = block_size(checkpoint)
    expected = blocks_of(weight.shape, block)
    if info.shape != expected:
        raise CheckpointError(
            f"{info.file}: {info.name} has shape {list(info.shape)}, but {list(weight.shape)} in blocks of "
            f"{list(block)} needs {list(expected)}"
        )
    return info


@cache
def _library(block: tuple[int, int]) -> Any:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    return FP8BlockDequantizer(targets=["m"], weight_block_size=block, dtype=torch.float32)


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantize FP8 as q * scale per block, in float32 on the tensors' device. weight (R, C), scale (⌈R/b⌉, ⌈C/b⌉)."""
    result: torch.Tensor = _library(block).process({"m.weight": weight, f"m.{SCALE_INV}": scale})["m.weight"]
    return result


def packed_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """The weight (R, C) of a module of packed integers, in float32 on `device`.

    Raises:
        CheckpointError: a tensor is missing, or they do not belong together.
    """
    info = checkpoint.tensors[f"{module}.weight_packed"]
    scale_info = checkpoint.require(f"{module}.weight_scale", "the scales of a packed weight")
    shape_info = checkpoint.require(f"{module}.weight_shape", "the shape of a packed weight")
    for suffix in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{suffix}" in checkpoint.tensors:
            raise CheckpointError(
                f"{info.file}: {module}.{suffix}: only symmetric integers with groups in order of columns can be read"
            )
    shape = checkpoint.tensor(shape_info.name).flatten().tolist()
    if len(shape) != 2 or len(info.shape) != 2 or len(scale_info.shape) != 2 or info.dtype != "I32":
        raise CheckpointError(
            f"{info.file}: {module}: packed {info.dtype} {list(info.shape)}, scale {list(scale_info.shape)} and "
            f"weight_shape {reprlib.repr(shape)}; int32 words and scales in rows and columns are needed"
        )
    rows, columns = (int(n) for n in shape)
    bits, remainder = divmod(info.shape[1] * 32, columns) if columns > 0 else (0, 1)
    groups = scale_info.shape[1]
    if (
        bits not in (4, 8)
        or remainder
        or info.shape[0] != rows
        or scale_info.shape[0] != rows
        or not groups
        or columns % groups
    ):
        raise CheckpointError(
            f"{info.file}: {module}: packed {list(info.shape)}, scale {list(scale_info.shape)} and "
            f"weight_shape {[rows, columns]} do not belong together"
        )
    packed = checkpoint.tensor(info.name).to(device)
    scale = checkpoint.tensor(scale_info.name).to(device).float()
    return dequantize(unpack(packed, bits, (rows, columns)), scale)


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers are, as a bool of no dimension on the tensor's device: nothing waits for it."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    floating = tensor.float() if tensor.element_size() == 1 else tensor
    return torch.stack(torch.aminmax(floating)).isfinite().all()  # a NaN is both; without arrays of its size


def foreign_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor | None:
    """A module's weight (R, C) in float32 on `device`, dequantized from one of the formats above.

    Returns:
        The weight, or None if its format is none of those above.

    Raises:
        CheckpointError: the module's tensors do not fit each other.
    """
    if f"{module}.qweight" in checkpoint.tensors:
        return dequantize_awq_gptq(checkpoint, module, device)
    parts = {part: checkpoint.tensors.get(f"{module}.{part}") for part in _PARTS}
    scale, weight = parts["weight_scale"], parts["weight"]
    if parts["weight_packed"] is not None:
        asymmetric = parts["weight_zero_point"] is not None and not _all_symmetric(checkpoint)
        return _asymmetric(checkpoint, module, device) if asymmetric else None
    if weight is None or scale is None or len(weight.shape) != 2:
        return None
    if weight.dtype not in ("I8", FP8):
        return None
    if weight.dtype == FP8 and scale.shape == blocks_of(weight.shape, block_size(checkpoint)):
        return None
    codes = checkpoint.tensor(weight.name).to(device).float()
    zero = parts["weight_zero_point"]
    if zero is not None:
        codes -= _spread(checkpoint, zero, weight, device)
    return codes.mul_(_spread(checkpoint, scale, weight, device))


_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point")


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
    block = _declared_block(checkpoint)
    if block is not None and scale.shape == blocks_of(weight.shape, block):
        return values.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    raise CheckpointError(
        f"{scale.file}: {scale.name} has shape {list(scale.shape)}; one number, or one per row, group or declared "
        f"block of {list(weight.shape)} is needed"
    )


def _weight_schemes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The `weights` entry of every config group."""
    section = checkpoint.config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, dict) else None
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return [weights for weights in schemes if isinstance(weights, dict)]


def _all_symmetric(checkpoint: Checkpoint) -> bool:
    return all(weights.get("symmetric", True) for weights in _weight_schemes(checkpoint))


def _declared_block(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The `block_structure` of the first config group that has one."""
    for weights in _weight_schemes(checkpoint):
        block = weights.get("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
    return None


def _asymmetric(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Dequantize as (code - zero) * scale. The zero points (R, n) are packed along the rows."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    packed, scale, shape, zero = (
        checkpoint.tensor(checkpoint.require(f"{module}.{name}", "a packed weight with zero points").name)
        for name in names
    )
    rows, columns = [int(n) for n in shape.flatten().tolist()] if shape.numel() == 2 else (0, 0)
    bits = packed.shape[-1] * 32 // columns if packed.dim() == 2 and columns > 0 else 0
    groups = scale.shape[-1] if scale.dim() == 2 else 0
    if (
        bits not in (4, 8)
        or packed.shape != (rows, columns * bits // 32)
        or not groups
        or scale.shape != (rows, groups)
        or columns % groups
        or zero.shape != (math.ceil(rows * bits / 32), groups)
        or zero.dtype != packed.dtype
        or f"{module}.weight_g_idx" in checkpoint.tensors
    ):
        raise CheckpointError(
            f"{checkpoint.folder}: {module}: packed {list(packed.shape)}, scale {list(scale.shape)}, zero point "
            f"{list(zero.shape)} and weight_shape {[rows, columns]} do not fit each other"
        )
    codes = unpack_from_int32(packed.to(device), bits, torch.Size((rows, columns))).float()
    zeros = unpack_from_int32(zero.to(device), bits, torch.Size((rows, groups)), packed_dim=0).float()
    shifted = codes.view(rows, groups, -1) - zeros.unsqueeze(-1)
    weight: torch.Tensor = (shifted * scale.to(device).float().unsqueeze(-1)).view(rows, columns)
    return weight
