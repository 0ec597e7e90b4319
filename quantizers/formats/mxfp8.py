"""MXFP8: FP8 (E4M3) codes, an E8M0 scale for every 32 weights of a row.

    weight F8_E4M3 (R, C), weight_scale U8 (R, C / 32)        compressed-tensors' `mxfp8-quantized`, which vLLM knows by
                                                              `scale_dtype: torch.uint8` of the config group
                                                              ModelOpt's MXFP8 (quant_method modelopt; Hy4-preview-FP8)
    weight F8_E4M3 (R, C), weight_scale_inv U8 (R, C / 32)    quant_method mxfp8, weight_block_size [1, 32], scale_fmt
                                                              ue8m0 (MiniMax-M3-MXFP8); transformers' class for it is
                                                              that of FP8, whose own files have F8_E8M0

From compressed-tensors 0.19 (compressors/mxfp8), vLLM 0.32 (quantization/modelopt.py, ModelOptMxFp8Config and
KMxfp8Static), transformers 5.24 (quantizers/auto.py, integrations/finegrained_fp8.py) and the tests of MiniMax's and
SGLang's converters. vLLM has a scheme of compressed-tensors for linear layers (CompressedTensorsW8A8Mxfp8) and one for
experts (CompressedTensorsW8A8Mxfp8MoEMethod); both copy the scale into a parameter of uint8, so that bytes named
F8_E8M0 would be loaded as wrong numbers without an error. They are written as U8.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import FP8, Spec

from .e8m0 import BYTES, DTYPES, GROUP, numbers
from .format import SCALE, SCALES, Parts, QuantizedFormat, StoredMatrix, arguments, first_part
from .fp8 import e4m3_numbers
from .packed_integers import dequantize

if TYPE_CHECKING:
    import torch

SCALE_DTYPE = "torch.uint8"  # of the scale, as a config group says it


@dataclass(frozen=True)
class Mxfp8(QuantizedFormat):
    """FP8 with a power of two for every 32 weights."""

    weight_bits: ClassVar[int] = 8
    kind: ClassVar[str] = "mxfp8"
    description: ClassVar[str] = "MXFP8"
    group_name: ClassVar[str] = "mxfp8"

    def __str__(self) -> str:
        return "MXFP8"

    @property
    def edges(self) -> tuple[int, int]:
        """A group of a row."""
        return (1, GROUP)

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes and scales, as compressed-tensors names them and vLLM loads them."""
        rows, columns = shape
        return (("weight", Spec(FP8, (rows, columns))), (SCALE, Spec(BYTES, (rows, columns // GROUP))))

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) float32 of some rows."""
        return dequantize(e4m3_numbers(parts[0]), numbers(parts[1]))

    def config_group(self) -> dict[str, Any]:
        """Weights in groups, activations alike."""
        weights = arguments(8, "float", "group", group_size=GROUP, scale_dtype=SCALE_DTYPE)
        return {"format": FORMAT, "weights": weights, "input_activations": weights | {"dynamic": True}}

    @classmethod
    def of_config_group(cls, weights: Mapping[str, Any], inputs: Any) -> Self | None:
        """FP8 in groups of 32 with scales in bytes, whatever becomes of activations."""
        own = [weights.get(key) for key in ("type", "num_bits", "strategy", "group_size", "scale_dtype")]
        return cls() if own == ["float", 8, "group", GROUP, SCALE_DTYPE] else None

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of FP8 codes with E8M0 scales of another shape than that of blocks."""
        codes, scale = checkpoint.tensors.get(f"{module}.weight"), first_part(checkpoint, module, SCALES)
        if codes is None or codes.dtype != FP8 or len(codes.shape) != 2 or scale is None or scale.dtype not in DTYPES:
            return None
        rows, columns = codes.shape
        if scale.shape != (rows, columns // GROUP) or columns % GROUP:
            return None  # perhaps of blocks; fp8.py says what is wrong with any other
        return StoredMatrix(cls(), ("weight", scale.name.rpartition(".")[2]), (rows, columns))


FORMAT = "mxfp8-quantized"
