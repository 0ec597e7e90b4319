"""NVFP4 in compressed-tensors' `nvfp4-pack-quantized` layout: E2M1 codes, E4M3 scales of 16, one float32 scale.

    weight_packed        U8 (R, C / 2)        two codes a byte, the even column in the low half
    weight_scale         F8_E4M3 (R, C / 16)
    weight_global_scale  F32 (1,)             448 · 6 / max|W|, a divisor: weight = code · weight_scale / it
    input_global_scale   F32 (1,)             448 · 6 / max|x|, where a server also quantizes activations

gate and up (w1 and w3) of an expert have the same global scales: servers multiply both in one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import FP8, Spec
from quantizers.system.errors import CheckpointError

from .e8m0 import DTYPES
from .format import ACTIVATIONS, PACKED, SCALE, ExpertFormat, Grid, Parts, StoredMatrix, arguments
from .packed_integers import dequantize

if TYPE_CHECKING:
    import torch

GROUP = 16
GLOBAL_SCALE, INPUT_SCALE = "weight_global_scale", "input_global_scale"
E2M1: Literal["e2m1"] = "e2m1"
LARGEST_E2M1 = 6.0
LARGEST_E4M3 = 448.0
SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class Nvfp4(ExpertFormat):
    """FP4 (E2M1) with an FP8 scale for every 16 weights and a scale of the whole matrix.

    `activations` has 16 bits, or 4 where a server can: then each matrix has a global scale of its inputs, too.
    """

    bits: int = field(default=4, init=False)
    group_size: int = field(default=GROUP, init=False)
    activations: int = 16

    name: ClassVar[str] = "nvfp4"
    keys: ClassVar[frozenset[str]] = frozenset({ACTIVATIONS})
    unknown_on: ClassVar[tuple[str, ...]] = ("vllm-cpu",)

    @classmethod
    def of_keys(cls, keys: Mapping[str, Any]) -> Self:
        """The format with these activations."""
        return cls(keys.get(ACTIVATIONS, 16))

    def __str__(self) -> str:
        return f"NVFP4 W4A{self.activations}"

    @property
    def kind(self) -> str:
        """By what becomes of activations."""
        return "nvfp4-a4" if self.input_scales else "nvfp4"

    @property
    def description(self) -> str:
        """Its name."""
        return str(self)

    @property
    def short(self) -> str:
        """`NVFP4`."""
        return "NVFP4"

    @property
    def words(self) -> tuple[str, ...]:
        """Its name: it has no other group size."""
        return (str(self),)

    @property
    def in_words(self) -> str:
        """Description of the storage format, for the model card."""
        return f"{self}: FP4 (E2M1), one FP8 scale per {GROUP} weights, one float32 scale per matrix"

    @property
    def grid(self) -> Grid:
        """E2M1."""
        return E2M1

    @property
    def coarse_scales(self) -> bool:
        """E4M3 is too coarse."""
        return True

    @property
    def input_scales(self) -> bool:
        """With activations of 4 bits."""
        return self.activations == 4

    @property
    def measured_on(self) -> tuple[str, ...]:
        """With activations of 4 bits on Blackwell, which rounds them."""
        return ("blackwell",) if self.input_scales else ()

    @property
    def group_name(self) -> str:
        """With the bits of activations."""
        return f"nvfp4_w4a{self.activations}"

    @property
    def bits_per_weight(self) -> float:
        """4.5."""
        return self.bits + 8 / GROUP

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes, their scales, and one or two scales of the whole matrix."""
        rows, columns = shape
        of_matrix = (GLOBAL_SCALE, INPUT_SCALE) if self.input_scales else (GLOBAL_SCALE,)
        return (
            (PACKED, Spec("U8", (rows, columns // 2))),
            (SCALE, Spec(FP8, (rows, columns // GROUP))),
            *((name, Spec("F32", (1,))) for name in of_matrix),
        )

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes uint8 (…, R, C / 2)."""
        return pack(codes)

    def pack_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """The E4M3 scales: twice those of codes that are twice E2M1's values."""
        return nearest_e4m3(2 * scale)

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) float32 of some rows."""
        return dequantize(unpack(parts[0]), parts[1].float() / parts[2])

    def config_group(self) -> dict[str, Any]:
        """Weights in groups with a scale of the matrix, and activations alike where they are quantized."""
        weights = arguments(4, "float", "tensor_group", group_size=GROUP, scale_dtype="torch.float8_e4m3fn")
        inputs = weights | {"dynamic": "local"} if self.input_scales else None
        return {"format": "nvfp4-pack-quantized", "weights": weights, "input_activations": inputs}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """The format of FP4 with a scale per group and one of the matrix; of activations that are quantized, too."""
        own = [weights.get(key) for key in ("type", "num_bits", "strategy", "group_size")]
        return cls(4 if inputs else 16) if own == ["float", 4, "tensor_group", GROUP] else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of E2M1 codes with E4M3 scales."""
        codes = checkpoint.tensors.get(f"{module}.{PACKED}")
        if codes is None or codes.dtype != "U8":
            return None
        scale = checkpoint.tensors.get(f"{module}.{SCALE}")
        if scale is not None and scale.dtype in DTYPES:
            return None
        names = (PACKED, SCALE, GLOBAL_SCALE)
        packed, scale, whole = (checkpoint.require(f"{module}.{name}", "part of an FP4 weight") for name in names)
        rows, columns = (packed.shape[0], 2 * packed.shape[1]) if len(packed.shape) == 2 else (0, 0)
        stored = [(info.dtype, info.shape) for info in (scale, whole)]
        if not rows or stored != [(FP8, (rows, columns // GROUP)), ("F32", (1,))] or columns % GROUP:
            raise CheckpointError(
                f"{packed.file}: {module}",
                f"weight_packed U8 {list(packed.shape)}, weight_scale {scale.dtype} {list(scale.shape)} and "
                f"{GLOBAL_SCALE} {whole.dtype} {list(whole.shape)} are no NVFP4 weight",
            )
        form = cls(4 if f"{module}.{INPUT_SCALE}" in checkpoint.tensors else 16)
        return StoredMatrix(form, names, (rows, columns))

    @classmethod
    def of_experts(cls, checkpoint: Checkpoint, modules: Sequence[str]) -> Self | None:
        """The format of the first matrix that is stored in it."""
        matrices = (cls.stored(checkpoint, module) for module in modules)
        matrix = next(filter(None, matrices), None)
        return matrix.form if matrix is not None and isinstance(matrix.form, cls) else None


def global_scale(largest: torch.Tensor) -> torch.Tensor:
    """The global scale of what has this largest magnitude (…) float32; 1 where that is zero, as compressed-tensors."""
    import torch

    scale = LARGEST_E4M3 * LARGEST_E2M1 / largest.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(torch.isfinite(scale), scale, 1)


def nearest_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """The nearest positive E4M3 number."""
    import torch

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
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = packed.shape
    values: torch.Tensor = unpack_fp4_from_uint8(packed, rows, 2 * half, torch.float32)
    return values
