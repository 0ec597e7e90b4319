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

from quantizers.checkpoint.reader import Checkpoint, block_size
from quantizers.checkpoint.safetensors_header import TensorInfo
from quantizers.system.errors import CheckpointError

from .codes import dequantize
from .packing import unpack

PLAIN = ("BF16", "F16", "F32")


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
    if info.dtype != "F8_E4M3":
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


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Rows and columns of blocks in a matrix, partial ones included."""
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def fp8_scale(checkpoint: Checkpoint, module: str) -> TensorInfo:
    """The header entry of the scale of an FP8 module in blocks: `weight_scale_inv`, as published, or `weight_scale`.

    Raises:
        CheckpointError: there is none, or weight and scale do not belong together.
    """
    weight = checkpoint.tensors[f"{module}.weight"]
    names = (f"{module}.weight_scale_inv", f"{module}.weight_scale")
    info = next((checkpoint.tensors[name] for name in names if name in checkpoint.tensors), None)
    if info is None:
        raise CheckpointError(
            f"{weight.file}: {module}.weight is FP8 but has no weight_scale_inv; the checkpoint is incomplete, "
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
    result: torch.Tensor = _library(block).process({"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]
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
