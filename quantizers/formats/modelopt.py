"""NVFP4 as NVIDIA's ModelOpt stores it: E2M1 codes, E4M3 scales of 16, one float32 scale, which is a factor.

    weight          U8 (R, C / 2)         two codes a byte, the even column in the low half
    weight_scale    F8_E4M3 (R, C / 16)
    weight_scale_2  F32 () or (1,)        max|W| / (448 · 6): weight = code · (weight_scale · weight_scale_2)
    input_scale     F32 () or (1,)        max|x| / (448 · 6), where a server also quantizes activations (NVFP4, and not
                                          W4A16_NVFP4)

Declared by quant_method modelopt and quant_algo NVFP4, W4A16_NVFP4 or MIXED_PRECISION, in config.json or, in older
releases, in hf_quant_config.json alone (nvidia/DeepSeek-R1-FP4). From vLLM 0.32 (quantization/modelopt.py),
compressed-tensors 0.19 (entrypoints/convert/converters/modelopt_nvfp4.py) and ModelOpt's NVFP4QTensor, whose order of
products this is.

compressed-tensors' scale of the matrix is the inverse, a divisor, and an inverse of a float32 rounds: the same numbers
under its names are not always the same float32. A server reads only one of both declarations in a checkpoint.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quantizers.checkpoint.reader import CONFIG, DECLARATION, Checkpoint, read_json
from quantizers.checkpoint.safetensors_header import FP8, Spec
from quantizers.system.errors import CheckpointError

from .e8m0 import BYTES
from .format import SCALE, Parts, RowFormat, StoredMatrix
from .nvfp4 import GROUP, unpack
from .packed_integers import dequantize

if TYPE_CHECKING:
    import torch

MODELOPT = "modelopt"  # quantization_config.quant_method
# quant_algo of files that are read: FP8 with a scale of the matrix or of rows, MXFP8 (mxfp8.py), and NVFP4.
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION", "MXFP8", "NVFP4", "W4A16_NVFP4")
WHOLE, INPUT = "weight_scale_2", "input_scale"
NAMES = ("weight", SCALE, WHOLE)


@dataclass(frozen=True)
class ModeloptNvfp4(RowFormat):
    """ModelOpt's NVFP4; `activations` has 4 bits where a scale of the inputs is stored, otherwise 16."""

    activations: int = 4

    weight_bits: ClassVar[int] = 4
    kind: ClassVar[str] = "nvfp4-modelopt"
    description: ClassVar[str] = "ModelOpt's NVFP4"

    def __str__(self) -> str:
        return f"ModelOpt's NVFP4 W4A{self.activations}"

    @property
    def edges(self) -> tuple[int, int]:
        """A group of a row."""
        return (1, GROUP)

    def parts(self, shape: tuple[int, ...]) -> Parts:
        """Codes, their scales, and one or two scales of the whole matrix."""
        rows, columns = shape
        of_matrix = (WHOLE, INPUT) if self.activations == 4 else (WHOLE,)
        return (
            ("weight", Spec(BYTES, (rows, columns // 2))),
            (SCALE, Spec(FP8, (rows, columns // GROUP))),
            *((name, Spec("F32", ())) for name in of_matrix),
        )

    def unpack(self, parts: Sequence[torch.Tensor], columns: int) -> torch.Tensor:
        """The numbers (r, C) float32 of some rows."""
        codes, scale, whole = parts
        return dequantize(unpack(codes), scale.float() * whole.view(1, 1))

    @classmethod
    def stored(cls, checkpoint: Checkpoint, module: str) -> StoredMatrix | None:
        """A matrix of bytes with E4M3 scales, or with a scale of the matrix."""
        codes = checkpoint.tensors.get(f"{module}.{NAMES[0]}")
        if codes is None or codes.dtype != BYTES:
            return None
        scale, whole = (checkpoint.tensors.get(f"{module}.{name}") for name in NAMES[1:])
        if whole is None and (scale is None or scale.dtype != FP8):
            return None
        scale, whole = (checkpoint.require(f"{module}.{name}", "part of an NVFP4 weight") for name in NAMES[1:])
        rows, columns = (codes.shape[0], 2 * codes.shape[1]) if len(codes.shape) == 2 else (0, 0)
        fits = (scale.dtype, scale.shape) == (FP8, (rows, columns // GROUP)) and not columns % GROUP
        if not rows or not fits or whole.dtype != "F32" or whole.shape not in ((), (1,)):
            raise CheckpointError(
                f"{codes.file}: {module}",
                f"weight U8 {list(codes.shape)}, weight_scale {scale.dtype} {list(scale.shape)} and {WHOLE} "
                f"{whole.dtype} {list(whole.shape)} are no NVFP4 weight, which has half as many bytes as columns, an "
                f"F8_E4M3 scale for every {GROUP} columns and an F32 scale of the matrix",
                "give the published checkpoint",
            )
        form = cls(4 if f"{module}.{INPUT}" in checkpoint.tensors else 16)
        return StoredMatrix(form, NAMES, (rows, columns))


# As declared ---------------------------------------------------------------------------------------------------------


def algorithm(section: Mapping[str, Any]) -> Any:
    """The quant_algo of a `quantization_config`, or of hf_quant_config.json, in capitals; None if it is not said."""
    inner = section.get("quantization")  # hf_quant_config.json has it, and Hy4's config.json
    name = (inner if isinstance(inner, Mapping) else section).get("quant_algo")
    return name.upper() if isinstance(name, str) else name


def algorithm_problems(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Problems of a quant_algo, if there is one, and what to do."""
    if (name := algorithm(section)) is not None and name not in ALGORITHMS:
        yield (
            f"quant_algo is {reprlib.repr(name)}, and only {', '.join(ALGORITHMS)} can be read of ModelOpt's",
            "evaluate it with the program that made it",
        )


def refuse_undeclared(checkpoint: Checkpoint) -> None:
    """Raise a CheckpointError if ModelOpt's files are not declared, or are declared as two things.

    config.json says it, or hf_quant_config.json beside it, or both.
    """
    section, file = checkpoint.config.get("quantization_config"), checkpoint.folder / DECLARATION
    section = section if isinstance(section, Mapping) else {}
    declared, beside = algorithm(section), None
    if file.exists():
        beside = algorithm(read_json(file))
        for problem, remedy in algorithm_problems({"quant_algo": beside}):
            raise CheckpointError(file, problem, remedy)
        if section and beside != declared is not None:
            raise CheckpointError(
                file,
                f"quant_algo is {beside!r}, but {CONFIG} says {reprlib.repr(declared)}",
                "download both files of one release",
            )
    whole = next((name for name in checkpoint.tensors if name.endswith(f".{WHOLE}")), None)
    if (whole is not None or section.get("quant_method") == MODELOPT) and declared is None and beside is None:
        reason = f"the files have {whole}, of ModelOpt's NVFP4" if whole else f"quant_method is {MODELOPT!r}"
        raise CheckpointError(
            checkpoint.folder / CONFIG,
            f"{reason}, but no quant_algo is said here, and there is none in {DECLARATION}",
            f"download {DECLARATION} of the release into this folder",
        )
