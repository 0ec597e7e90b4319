"""MXFP4: two E2M1 codes a byte, the even column in the low half, an E8M0 scale for every 32 weights of a row.

    weight_packed U8 (R, C / 2), weight_scale U8 (R, C / 32)    compressed-tensors' `mxfp4-pack-quantized`
    weight I8 (R, C / 2), scale F8_E8M0 (R, C / 32)             experts of DeepSeek-V4 (quant_method fp8, expert_dtype
                                                                fp4); transformers writes weight_scale_inv for scale
    weight U8 (R, C / 2), weight_scale U8 (R, C / 32)           AMD's Quark (quant_method quark, dtype fp4)
    _blocks U8 (E, R, C / 32, 16), _scales U8 (E, R, C / 32)    all experts of a layer of gpt-oss, see tensor_names.py

From compressed-tensors 0.19 (compressors/mxfp4), transformers 5.24 (integrations/finegrained_fp8.py: Fp8Dequantize,
conversion_mapping.py: deepseek_v4), DeepSeek-V4's own inference code (float4_e2m1fn_x2 weights, float8_e8m0fnu scales)
and vLLM 0.32 (quantization/quark, compressed_tensors.py: `_is_mxfp4`). vLLM has schemes of compressed-tensors for
linear layers (CompressedTensorsW4A4Mxfp4) and for experts (CompressedTensorsW4A4Mxfp4MoEMethod); it copies scales into
parameters of uint8, so they are written as U8.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.system.errors import CheckpointError

from .e8m0 import BYTES, DTYPES, GROUP, numbers
from .format import PACKED, SCALE, SCALES, Parts, QuantizedFormat, StoredMatrix, arguments, first_part
from .mxfp8 import SCALE_DTYPE
from .nvfp4 import GLOBAL_SCALE, unpack
from .packed_integers import dequantize

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES_OF_BLOCKS = "_blocks", "_scales"  # ends of the names of tensors of all experts


@dataclass(frozen=True)
class Mxfp4(QuantizedFormat):
    """FP4 (E2M1) with a power of two for every 32 weights."""

    weight_bits: ClassVar[int] = 4
    kind: ClassVar[str] = "mxfp4"
    description: ClassVar[str] = "MXFP4"
    group_name: ClassVar[str] = "mxfp4"

    def __str__(self) -> str:
        return "MXFP4"

    @property
    def edges(self) -> tuple[int, int]:
        """A group of a row."""
        return (1, GROUP)

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes and scales, as compressed-tensors names them and vLLM loads them."""
        rows, columns = shape
        return ((PACKED, Spec(BYTES, (rows, columns // 2))), (SCALE, Spec(BYTES, (rows, columns // GROUP))))

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) float32 of some rows."""
        import torch

        return dequantize(unpack(parts[0].view(torch.uint8)), numbers(parts[1]))

    def config_group(self) -> dict[str, Any]:
        """Weights alone, in groups."""
        weights = arguments(4, "float", "group", group_size=GROUP, scale_dtype=SCALE_DTYPE)
        return {"format": FORMAT, "weights": weights, "input_activations": None}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """FP4 in groups of 32, whatever becomes of activations."""
        own = [weights.get(key) for key in ("type", "num_bits", "strategy", "group_size")]
        return cls() if own == ["float", 4, "group", GROUP] else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of bytes with E8M0 scales."""
        codes, scale = first_part(checkpoint, module, (PACKED, "weight")), first_part(checkpoint, module, SCALES)
        if codes is None or codes.dtype not in (BYTES, "I8") or scale is None or scale.dtype not in DTYPES:
            return None
        rows, columns = (codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
        whole = f"{module}.{GLOBAL_SCALE}" in checkpoint.tensors
        if not rows or columns % GROUP or scale.shape != (rows, columns // GROUP) or whole:
            raise CheckpointError(
                codes.file,
                f"{codes.name} {codes.dtype} {list(codes.shape)} and {scale.name} {scale.dtype} {list(scale.shape)} "
                f"are no MXFP4 weight, which has a byte for 2 columns and a scale for every {GROUP}, and no other",
                "give the published checkpoint",
            )
        parts = tuple(info.name.rpartition(".")[2] for info in (codes, scale))
        return StoredMatrix(cls(), parts, (rows, columns))


FORMAT = "mxfp4-pack-quantized"
