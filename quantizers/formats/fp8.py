"""The FP8 formats of published models.

    a scale per block   weight F8_E4M3 (R, C), weight_scale_inv (⌈R / b⌉, ⌈C / b⌉)   quant_method fp8
                        weight F8_E4M3 (R, C), weight_scale (⌈R / b⌉, ⌈C / b⌉)       compressed-tensors' `block`
                        weight F8_E4M3 (R, C), scale (⌈R / b⌉, ⌈C / b⌉)              DeepSeek-V4, scale_fmt ue8m0
    a scale per row     weight F8_E4M3 (R, C), weight_scale (R, 1)                   compressed-tensors' `channel`

Detected from the tensors; from config.json only for a plan without files. Those of compressed-tensors keep their names.
Scales are F32 or BF16, those of blocks also E8M0 (F8_E8M0 or U8, see e8m0.py; DeepSeek-V4 has blocks of 128 x 128, and
V4.1 of 32 x 32). vLLM's scheme of compressed-tensors has scales of blocks in float32 and copies F8_E8M0 into them as
the numbers they are, but U8 as integers, so that scales in bytes are written as F8_E8M0, the same bytes. With a scale
for every 32 columns of each row it is MXFP8, see mxfp8.py.

Weights are made FP8 by these formulas, which `verify` applies again:

    rows      a scale per row
    blocks    a scale per block of 128 x 128, a power of two

No scale clips a weight. Of STEPS scales within a factor of two, that of a row is the one with the least squared error,
which lowers the relative error of normally distributed weights from 0.0265 to 0.0257. A block's is a power of two, as
vLLM's DeepGEMM makes it one on loading (`requant_weight_ue8m0_inplace`): any other scale rounds the weights once more,
to 0.037; and of two powers of two, the larger one only loses more of the smallest weights.

Legend: R rows (outputs), C columns (inputs), b rows or columns of a block.
"""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard

from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Spec, Stored
from quantizers.system.errors import CheckpointError

from .e8m0 import DTYPES as IN_BYTES
from .e8m0 import E8M0, GROUP, numbers
from .format import SCALE, SCALES, Parts, QuantizedFormat, StoredMatrix, arguments, first_part, weight_schemes

if TYPE_CHECKING:
    from torch import Tensor

SCALE_INV = SCALES[0]  # the name of the scales of blocks where quant_method is fp8
LARGEST, STEPS = 448.0, 16


class Fp8(QuantizedFormat):
    """FP8 (E4M3) codes with scales of rows or blocks, which servers multiply with activations in FP8."""

    weight_bits: ClassVar[int] = 8

    @abstractmethod
    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the scale of a weight (R, C)."""

    @abstractmethod
    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes F8_E4M3 (R, C) and float32 scales of a weight (R, C) float32."""

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes and scales, under compressed-tensors' names."""
        return (("weight", Spec(FP8, shape)), (SCALE, Spec("F32", self.scale_shape(shape))))


@dataclass(frozen=True)
class Fp8Rows(Fp8):
    """FP8 with a scale per row."""

    kind: ClassVar[str] = "rows"
    description: ClassVar[str] = "FP8 per row"
    group_name: ClassVar[str] = "fp8_channel"

    def __str__(self) -> str:
        return "FP8 per channel"

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(R, 1)."""
        return (shape[0], 1)

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (R, C) and a scale (R, 1) of each row, by least squares."""
        import torch

        least = _least_scale(weight.abs().amax(1, keepdim=True))
        scales = torch.stack([least * 2 ** (step / STEPS) for step in range(STEPS)])  # (STEPS, R, 1)
        lost = torch.stack([(_codes(weight, s).float() * s - weight).double().square().sum(1) for s in scales])
        scale = scales.gather(0, lost.argmin(0)[None, :, None])[0]
        return _codes(weight, scale), scale

    def unpack(self, parts: Sequence[Tensor], columns: int) -> Tensor:
        """The numbers (r, C) float32 of some rows."""
        codes, scale = parts
        return e4m3_numbers(codes).mul_(scale.float().view(-1, 1))

    def config_group(self) -> dict[str, Any]:
        """Weights by row, activations by token."""
        inputs = arguments(8, "float", "token", dynamic=True)
        return {"format": FORMAT, "weights": arguments(8, "float", "channel"), "input_activations": inputs}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """FP8 per channel, whatever becomes of activations."""
        return cls() if _declared(weights) == "channel" else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix with a scale (R,) or (R, 1)."""
        shape, scale = _fp8_matrix(checkpoint, module), checkpoint.tensors.get(f"{module}.{SCALE}")
        if shape is None or scale is None or scale.shape == blocks_of(shape, block_size(checkpoint)):
            return None
        if scale.dtype not in FLOATING:
            return None
        return StoredMatrix(cls(), ("weight", SCALE), shape) if scale.shape in (shape[:1], (shape[0], 1)) else None


@dataclass(frozen=True)
class Fp8Blocks(Fp8):
    """FP8 with a scale per block of so many rows and columns, `scales` in F32 or F8_E8M0 where they are kept."""

    rows: int = 128
    columns: int = 128
    scales: str = "F32"

    kind: ClassVar[str] = "blocks"
    description: ClassVar[str] = "FP8 in blocks"
    group_name: ClassVar[str] = "fp8_block"

    def __str__(self) -> str:
        return f"FP8 block {self.rows}x{self.columns}"

    @property
    def edges(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.rows, self.columns

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """(⌈R / b⌉, ⌈C / b⌉)."""
        return blocks_of(shape, self.edges)

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes and scales, as compressed-tensors names them and vLLM loads them."""
        return (("weight", Spec(FP8, shape)), (SCALE, Spec(self.scales, self.scale_shape(shape))))

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (R, C) and a scale (⌈R / b⌉, ⌈C / b⌉) of each block, a power of two."""
        import torch

        (rows, columns), (height, width) = weight.shape, self.edges
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # (⌈R / b⌉, b, ⌈C / b⌉, b)
        mantissa, exponent = torch.frexp(_least_scale(blocks.abs().amax((1, 3), keepdim=True)))
        scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())  # at or above the least
        codes = _codes(blocks, scale).flatten(2, 3).flatten(0, 1)[:rows, :columns]
        return codes.contiguous(), scale[:, 0, :, 0].contiguous()

    def unpack(self, parts: Sequence[Tensor], columns: int) -> Tensor:
        """The numbers (r, C) float32 of some rows of blocks."""
        return dequantize_fp8(parts[0], numbers(parts[1]), self.edges)

    def config_group(self) -> dict[str, Any]:
        """Weights by block, activations in groups as wide."""
        weights = arguments(8, "float", "block", block_structure=list(self.edges))
        inputs = arguments(8, "float", "group", dynamic=True, group_size=self.columns)
        return {"format": FORMAT, "weights": weights, "input_activations": inputs}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """FP8 in blocks, whatever becomes of activations."""
        block = weights.get("block_structure")
        return cls(block[0], block[1]) if _is_block(block) and _declared(weights) == "block" else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix with a scale per block, or without the one that it needs: then a CheckpointError."""
        shape, block = _fp8_matrix(checkpoint, module), block_size(checkpoint)
        if shape is None:
            return None
        stored_scale, info = first_part(checkpoint, module, SCALES), checkpoint.tensors[f"{module}.weight"]
        expected = blocks_of(shape, block)
        if stored_scale is None:
            raise CheckpointError(
                info.file,
                f"{info.name} is FP8 but has no {SCALE_INV}",
                "the checkpoint is incomplete, download it again",
            )
        if stored_scale.dtype not in (*FLOATING, *IN_BYTES):
            raise CheckpointError(
                stored_scale.file,
                f"{stored_scale.name} is {stored_scale.dtype}, which is no scale of FP8",
                f"one in {', '.join((*FLOATING, *IN_BYTES))} is needed",
            )
        in_bytes, last = stored_scale.dtype in IN_BYTES, stored_scale.name.rpartition(".")[2]
        if stored_scale.shape != expected and last == SCALE and not in_bytes:
            return None
        if stored_scale.shape != expected:
            mx = f", and MXFP8 needs one for every {GROUP} of its columns" if in_bytes else ""
            raise CheckpointError(
                stored_scale.file,
                f"{stored_scale.name} has shape {list(stored_scale.shape)}, but {list(shape)} in blocks of "
                f"{list(block)} needs {list(expected)}{mx}",
            )
        return StoredMatrix(cls(*block, scales=E8M0 if in_bytes else "F32"), ("weight", last), shape)


FORMAT = "float-quantized"
ROWS, BLOCKS = Fp8Rows(), Fp8Blocks()  # as weights are made FP8 here


def _fp8_matrix(checkpoint: Checkpoint, module: str) -> tuple[int, int] | None:
    """R and C of a module's matrix, if its codes are FP8."""
    info = checkpoint.tensors.get(f"{module}.weight")
    return (info.shape[0], info.shape[1]) if info and info.dtype == FP8 and len(info.shape) == 2 else None


def _declared(weights: Mapping[str, Any]) -> str | None:
    """Return the scale strategy of weights that a config group declares as FP8; None for other weights."""
    return weights.get("strategy") if (weights.get("type"), weights.get("num_bits")) == ("float", 8) else None


def _least_scale(peak: Tensor) -> Tensor:
    """The smallest scale that clips nothing, for the largest magnitude; 1 where that is 0."""
    import torch

    return torch.where(peak > 0, peak / LARGEST, 1.0).clamp(min=torch.finfo(torch.float32).tiny)


def _codes(weight: Tensor, scale: Tensor) -> Tensor:
    import torch

    return (weight / scale).to(torch.float8_e4m3fn)


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale rounded to FP8 (E4M3), what is beyond its largest number to that, times the scale again; float32."""
    import torch

    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def e4m3_numbers(codes: Tensor) -> Tensor:
    """FP8 codes (E4M3) as float32, on their device.

    On a CPU by a table of its 256 numbers: torch's own conversion there takes five times as long, bit by bit.
    """
    import torch

    if codes.device.type != "cpu":
        return codes.float()
    return _e4m3_table().index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


@cache
def _e4m3_table() -> Tensor:
    """The number of each byte (256,) float32, as torch converts it."""
    import torch

    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Dequantize FP8 as q * scale per block, in float32 on the tensors' device. weight (R, C), scale (⌈R/b⌉, ⌈C/b⌉)."""
    height, width = block
    numbers, of_columns = e4m3_numbers(weight), scale.float().repeat_interleave(width, 1)[:, : weight.shape[1]]
    whole = len(weight) // height
    numbers[: whole * height].unflatten(0, (whole, height)).mul_(of_columns[:whole].unsqueeze(1))
    numbers[whole * height :].mul_(of_columns[whole:])  # the rows of a block that is cut off, if there is one
    return numbers


# As declared ---------------------------------------------------------------------------------------------------------


def block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns of an FP8 block, as config.json declares them, or 128x128 if it does not."""
    return declared_block(checkpoint.config, f"{checkpoint.folder}/{CONFIG}")


def declared_block(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """As `block_size`, from the content of config.json; `where` is its path, for messages."""
    section = config.get("quantization_config") or {}
    if not isinstance(section, dict):
        raise CheckpointError(where, f"quantization_config is {reprlib.repr(section)}", "an object is needed")
    key, declared = "weight_block_size", section.get("weight_block_size")
    structures = [weights["block_structure"] for weights in weight_schemes(config) if weights.get("block_structure")]
    if structures:
        key, declared = "config_groups: block_structure", structures[0]
    declared = declared or [128, 128]
    if not _is_block(declared):
        raise CheckpointError(
            where, f"quantization_config.{key} is {reprlib.repr(declared)}", "two positive numbers are needed"
        )
    return declared[0], declared[1]


def _is_block(declared: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(declared, list | tuple) and len(declared) == 2 and all(type(n) is int and n > 0 for n in declared)


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of blocks in a matrix, partial ones included."""
    (rows, columns), (height, width) = shape, block
    return -(-rows // height), -(-columns // width)


def stored_form(tensors: Mapping[str, Stored], block: tuple[int, int]) -> Fp8:
    """The format of a checkpoint with these tensors: ROWS if one is a scale per row, else in blocks of this size."""
    scales = ((name, scale.shape) for name, scale in tensors.items() if name.endswith(f".{SCALE}"))
    weights = ((tensors.get(name.removesuffix("_scale")), shape) for name, shape in scales)
    per_row = any(weight and _is_per_row(weight.shape, shape, block) for weight, shape in weights)
    return ROWS if per_row else Fp8Blocks(*block)


def _is_per_row(weight: Sequence[int], scale: Sequence[int], block: tuple[int, int]) -> bool:
    """Whether a scale of this shape is one per row of a weight (R, C)."""
    return tuple(scale) == (weight[0], 1) != blocks_of(weight, block)


def unreadable_scale(form: Fp8, scale: Stored, weight: tuple[int, ...]) -> str | None:
    """Describe the scale of a weight (R, C) if its form is recognized but cannot be read; None otherwise."""
    if scale.shape == form.scale_shape(weight):
        in_bytes = scale.dtype in IN_BYTES and not isinstance(form, Fp8Blocks)
        return "in E8M0, powers of two in a byte, of rows" if in_bytes else None
    if scale.shape in ((), (1,), (1, 1)):
        return "for the whole matrix"
    if scale.shape == weight[:1]:
        return "per row without a second dimension"
    if len(scale.shape) == 2 and scale.shape[0] == weight[0] and scale.shape[1] > 1 and not weight[1] % scale.shape[1]:
        return f"for {weight[1] // scale.shape[1]} columns of each row"
    return None


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether config.json declares scales for an FP8 cache of keys and values."""
    section = config.get("quantization_config")
    return isinstance(section, Mapping) and bool(section.get("kv_cache_scheme"))
