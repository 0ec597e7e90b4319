"""Dequantization of a linear module's weight, from every supported format, to float32.

format.py lists the formats. compressed-tensors' pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized,
mxfp8-quantized, int-quantized, float-quantized and naive-quantized are among them. Other formats are refused in
unsupported.py.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import CheckpointError

from .awq_gptq import AwqGptq
from .e8m0 import refuse_nan
from .foreign import foreign_format
from .format import PACKED, SCALES, ForeignFormat, Format, RowFormat, StoredMatrix, expert_formats
from .fp8 import Fp8Blocks, Fp8Rows, e4m3_numbers
from .modelopt import ModeloptNvfp4
from .mxfp4 import Mxfp4
from .mxfp8 import Mxfp8
from .plain import Plain

if TYPE_CHECKING:
    import torch


def read_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Read the weight (R, C) of a linear module, of this full published name, as float32 on `device`.

    Raises:
        CheckpointError: a tensor is missing, has a wrong dtype or shape, or contains NaN or infinity.
    """
    weight = unchecked_weight(checkpoint, module, device)
    if not bool(is_finite(weight)):
        for last in SCALES:
            if f"{module}.{last}" in checkpoint.tensors:
                refuse_nan(checkpoint, f"{module}.{last}")
        raise CheckpointError(
            checkpoint.folder, f"{module}.weight or its scale holds a NaN or infinity", "download its shard again"
        )
    return weight


def unchecked_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """As `read_weight`, but numbers that are not finite are left in."""
    matrix = stored_matrix(checkpoint, module)
    if isinstance(matrix, ForeignFormat):
        return matrix.read(checkpoint, module, device)
    parts = [checkpoint.tensor(f"{module}.{part}").to(device) for part in matrix.parts]
    return matrix.numbers(parts).float()


def refuse_bias(checkpoint: Checkpoint, module: str) -> None:
    """Refuse a bias that the family's model would not add. AutoGPTQ writes one of zeros beside every weight."""
    info = checkpoint.tensors.get(f"{module}.bias")
    if info is not None and bool(checkpoint.tensor(info.name).any()):
        raise CheckpointError(
            info.file,
            f"{info.name} is not zero, but this family's model adds no bias there",
            "the checkpoint is of another model, or was made with a correction that cannot be read here",
        )


def row_formats() -> tuple[type[RowFormat], ...]:
    """The formats of which rows can be read, in the order in which a matrix is looked for in them.

    First those whose tensors' names another one has as well, last those of which a weight may be left to foreign.py.
    """
    return (Mxfp4, Mxfp8, ModeloptNvfp4, *expert_formats().values(), Plain, Fp8Rows, Fp8Blocks)


def stored_matrix(checkpoint: Checkpoint, module: str) -> StoredMatrix | ForeignFormat:
    """A module's matrix in the format in which it is stored, from headers; or that of another program.

    Raises:
        CheckpointError: the weight is missing, or its tensors do not belong together.
    """
    if AwqGptq.has(checkpoint, module):
        return AwqGptq()
    if f"{module}.{PACKED}" not in checkpoint.tensors:
        checkpoint.require(f"{module}.weight", "a linear layer's weight")
    for form in row_formats():
        if (matrix := form.stored(checkpoint, module)) is not None:
            return matrix
    return foreign_format(checkpoint, module)


def stored_format(checkpoint: Checkpoint, module: str) -> Format:
    """The format in which a module's matrix is stored, from headers; raises as `stored_matrix`."""
    stored = stored_matrix(checkpoint, module)
    return stored.form if isinstance(stored, StoredMatrix) else stored


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers are, as a bool of no dimension on the tensor's device: nothing waits for it."""
    import torch

    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    floating = tensor
    if tensor.element_size() == 1:
        floating = e4m3_numbers(tensor) if tensor.dtype == torch.float8_e4m3fn else tensor.float()
    return torch.stack(torch.aminmax(floating)).isfinite().all()  # a NaN is both; without arrays of its size
