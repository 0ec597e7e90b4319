"""The quantized matrices of a source, found in its headers: which tensors are one matrix, in which form and shape.

FP8 in rows or blocks and numbers in 16 or 32 bits are not among them: their weight has the matrix's own name and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import FLOATING, Spec, Stored

from .dequantization import row_formats
from .format import PACKED, StoredMatrix

WEIGHT = "weight"


def quantized_matrices(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, StoredMatrix]:
    """Each module whose matrix is stored in one of these forms, with the last names of all its tensors.

    Args:
        tensors: the source's headers.
        config: the content of its config.json.
    """
    modules: dict[str, dict[str, Stored]] = {}
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        modules.setdefault(module, {})[last] = info
    matrices: dict[str, StoredMatrix] = {}
    for module, parts in modules.items():
        weight = parts.get(WEIGHT)
        if PACKED not in parts and (weight is None or weight.dtype in FLOATING):
            continue
        forms = (form.of_headers(parts, config) for form in row_formats())
        matrix = next((matrix for matrix in forms if matrix is not None), None)
        if matrix is not None:
            matrices[module] = matrix
    return matrices


def unpacked_headers(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """The headers as they would be with one tensor (R, C) in BF16 for each of `quantized_matrices`."""
    matrices = quantized_matrices(tensors, config)
    headers: dict[str, Stored] = {}
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        matrix = matrices.get(module)
        if matrix is None or last not in matrix.parts:
            headers[name] = info
        elif last == matrix.parts[0]:
            headers[f"{module}.{WEIGHT}"] = Spec("BF16", matrix.shape)
    return headers


def architecture_of(checkpoint: Checkpoint, own: Own = None) -> Architecture:
    """The facts about an opened source, see `architecture_for`.

    Raises:
        ArchitectureError: as `architecture_for`.
    """
    headers = unpacked_headers(checkpoint.tensors, checkpoint.config)
    return architecture_for(checkpoint.config, str(checkpoint.folder / CONFIG), own, headers)
