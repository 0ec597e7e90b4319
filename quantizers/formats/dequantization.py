"""Dequantization of a linear module's weight, from every supported format, to float32.

format.py lists the formats. compressed-tensors' pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized,
mxfp8-quantized, int-quantized, float-quantized and naive-quantized are among them. Other formats are refused in
unsupported.py.

Legend: R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import Stored, TensorInfo
from quantizers.system.errors import CheckpointError

from .awq_gptq import AwqGptq
from .e8m0 import refuse_nan
from .foreign import foreign_format
from .format import PACKED, SCALES, ForeignFormat, Format, RowFormat, StoredMatrix, expert_formats
from .fp8 import Fp8Blocks, Fp8Rows
from .modelopt import INPUT, WHOLE, ModeloptNvfp4
from .mxfp4 import Mxfp4
from .mxfp8 import Mxfp8
from .nvfp4 import GLOBAL_SCALE, INPUT_SCALE
from .packed_integers import GROUP_INDEX, SHAPE, ZERO_POINT, Integers
from .plain import Plain

if TYPE_CHECKING:
    import torch

# The last names of a linear module's tensors in all these formats, the numbers first.
LAST_NAMES = (
    PACKED, "weight", *SCALES, SHAPE, ZERO_POINT, GROUP_INDEX, GLOBAL_SCALE, INPUT_SCALE, WHOLE, INPUT,
)  # fmt: skip
# Those whose tensors' names another format has, too, and those of which a weight may be left to foreign.py.
FOUND_FIRST: tuple[type[RowFormat], ...] = (Mxfp4, Mxfp8, ModeloptNvfp4)
FOUND_LAST: tuple[type[RowFormat], ...] = (Plain, Fp8Rows, Fp8Blocks)


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


def stored_matrix(checkpoint: Checkpoint, module: str) -> StoredMatrix | ForeignFormat:
    """A module's matrix in the format in which it is stored, from headers; or that of another program.

    Raises:
        CheckpointError: the weight is missing, or its tensors do not belong together.
    """
    if AwqGptq.has(checkpoint, module):
        return AwqGptq()
    if f"{module}.{PACKED}" not in checkpoint.tensors:
        checkpoint.require(f"{module}.weight", "a linear layer's weight")
    for form in (*FOUND_FIRST, *expert_formats().values(), *FOUND_LAST):
        if (matrix := form.stored(checkpoint, module)) is not None:
            return matrix
    return foreign_format(checkpoint, module)


@dataclass(frozen=True)
class StoredForm:
    """The format of a module's matrix, and the last names of its tensors, the quantized numbers first.

    Those that `form.parts` lists come in its order, under the names that the checkpoint has for them: the same bytes,
    though perhaps in another dtype (see e8m0.py). Then come the others, such as a scale of the inputs.
    """

    form: RowFormat | ForeignFormat
    names: tuple[str, ...]


def form_of_headers(
    tensors: Mapping[str, Stored], module: str, shape: tuple[int, int], config: Mapping[str, Any], where: str
) -> StoredForm:
    """How a module's matrix (R, C) is stored, by header entries alone, which need not be those of files.

    Args:
        tensors: of the checkpoint, perhaps of a plan. config: the content of its config.json, for the size of blocks.
        where: its name, for messages.

    Raises:
        CheckpointError: as `stored_matrix`; or it is another matrix than (R, C).
    """
    there = [last for last in LAST_NAMES if f"{module}.{last}" in tensors]
    infos = {}
    for name in (f"{module}.{last}" for last in there):
        infos[name] = TensorInfo(name, tensors[name].dtype, tensors[name].shape, Path(where), 0, 0)
    headers = Checkpoint(Path(where), where, dict(config), infos)
    integers = infos[f"{module}.{PACKED}"].dtype == "I32" if PACKED in there else False
    matrix = (Integers.of_shape(headers, module, shape) if integers else None) or stored_matrix(headers, module)
    if isinstance(matrix, ForeignFormat):
        return StoredForm(matrix, tuple(there))
    if matrix.shape != shape:
        raise CheckpointError(
            f"{where}: {module}",
            f"has shape {list(matrix.shape)}, but {list(shape)} is needed",
            "give the published checkpoint",
        )
    return StoredForm(matrix.form, (*matrix.parts, *(last for last in there if last not in matrix.parts)))


def stored_format(checkpoint: Checkpoint, module: str) -> Format:
    """The format in which a module's matrix is stored, from headers; raises as `stored_matrix`."""
    stored = stored_matrix(checkpoint, module)
    return stored.form if isinstance(stored, StoredMatrix) else stored


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all numbers are, as a bool of no dimension on the tensor's device: nothing waits for it."""
    import torch

    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    floating = tensor.float() if tensor.element_size() == 1 else tensor
    return torch.stack(torch.aminmax(floating)).isfinite().all()  # a NaN is both; without arrays of its size
