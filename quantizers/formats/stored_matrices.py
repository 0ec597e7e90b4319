"""The quantized matrices of a source, found in its headers: which tensors are one matrix, in which form and shape.

FP8 in rows or blocks and numbers in 16 or 32 bits are not among them: their weight has the matrix's own name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Spec, Stored, TensorInfo

from .dequantization import row_formats
from .e8m0 import GROUP
from .format import PACKED, SCALES, StoredMatrix
from .fp8 import Fp8
from .mxfp4 import BLOCKS, SCALES_OF_BLOCKS
from .packed_integers import Integers
from .plain import Plain

WEIGHT = "weight"


def quantized_matrices(tensors: Mapping[str, Stored], config: dict[str, Any], where: str) -> dict[str, StoredMatrix]:
    """Each module whose matrix is stored in one of these forms, with the last names of all its tensors.

    Of these the first ones are those that the form's own `parts` lists, in its order.

    Args:
        tensors: the headers of a checkpoint called `where`.
        config: the content of its config.json.

    Raises:
        CheckpointError: the tensors of a matrix do not belong together.
    """
    infos: dict[str, TensorInfo] = {}
    modules: dict[str, set[str]] = {}
    planned = Path(where)
    for name, info in tensors.items():
        infos[name] = info if isinstance(info, TensorInfo) else TensorInfo(name, info.dtype, info.shape, planned, 0, 0)
        module, _, last = name.rpartition(".")
        modules.setdefault(module, set()).add(last)
    headers = Checkpoint(planned, where, config, infos)
    forms = [form for form in row_formats() if not issubclass(form, Plain | Fp8 | Integers)]
    matrices: dict[str, StoredMatrix] = {}
    for module, names in modules.items():
        plain = WEIGHT in names and infos[f"{module}.{WEIGHT}"].dtype in FLOATING
        if plain or not names & {PACKED, WEIGHT}:
            continue
        stored = (form.stored(headers, module) for form in forms)
        matrix = next(filter(None, stored), None) or Integers.of_headers(headers, module)
        if matrix is not None:
            beside = (last for last, _ in matrix.form.parts(matrix.shape)[len(matrix.parts) :])
            parts = (*matrix.parts, *(last for last in beside if last in names))
            matrices[module] = StoredMatrix(matrix.form, parts, matrix.shape)
    return matrices


def unpacked_headers(checkpoint: Checkpoint) -> dict[str, Stored]:
    """A checkpoint's headers as they would be with one tensor (R, C) in BF16 for each of `quantized_matrices`.

    MXFP4 of all experts in one tensor becomes what transformers makes of it, (E, C, R).
    """
    matrices = quantized_matrices(checkpoint.tensors, checkpoint.config, str(checkpoint.folder))
    headers: dict[str, Stored] = {}
    for name, info in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        base = name.removesuffix(BLOCKS).removesuffix(SCALES_OF_BLOCKS)
        scales = checkpoint.tensors.get(f"{base}{SCALES_OF_BLOCKS}")
        if scales is not None and len(scales.shape) == 3 and f"{base}{BLOCKS}" in checkpoint.tensors:
            experts, rows, groups = scales.shape
            headers[base] = Spec("BF16", (experts, groups * GROUP, rows))
            continue
        matrix, weight = matrices.get(module), checkpoint.tensors.get(f"{module}.{WEIGHT}")
        if matrix is None and last == SCALES[-1] and weight is not None and weight.dtype == FP8:
            continue  # which nothing else knows as a scale
        if matrix is None or last not in matrix.parts:
            headers[name] = info
        elif last == matrix.parts[0]:
            headers[f"{module}.{WEIGHT}"] = Spec("BF16", matrix.shape)
    return headers


def architecture_of(checkpoint: Checkpoint, own: Own = None) -> Architecture:
    """The facts about an opened source, see `architecture_for`.

    Raises:
        ArchitectureError: as `architecture_for`.
        CheckpointError: as `quantized_matrices`.
    """
    return architecture_for(checkpoint.config, str(checkpoint.folder / CONFIG), own, unpacked_headers(checkpoint))
