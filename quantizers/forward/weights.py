"""Read the weights of linear modules as numbers, from all supported formats.

    FP8 e4m3 with one float32 scale per block   weight, weight_scale_inv (source) or weight_scale (ours)
    packed integers with a scale per group      weight_packed, weight_scale, weight_shape
    plain                                       weight
    formats of other programs                   see checkpoint/formats.py, integer_words.py

compressed-tensors does the FP8 dequantization, packing.py the unpacking. On a CPU everything becomes float32
without rounding to bfloat16 in between. FP8 bytes are copied to a GPU as FP8 and dequantized there.
"""

from __future__ import annotations

import math
import reprlib

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.formats import foreign_weight
from quantizers.checkpoint.reader import Checkpoint, block_size
from quantizers.system.errors import CheckpointError

from .codes import dequantize
from .packing import unpack

FP8 = torch.float8_e4m3fn


def scale_name(checkpoint: Checkpoint, module: str) -> str:
    """The name of an FP8 module's scale tensor: `weight_scale_inv`, as MiniMax publishes it, or `weight_scale`."""
    for suffix in ("weight_scale_inv", "weight_scale"):
        if f"{module}.{suffix}" in checkpoint.tensors:
            return f"{module}.{suffix}"
    raise CheckpointError(
        f"{checkpoint.tensors[f'{module}.weight'].file}: {module}.weight is FP8 but has no weight_scale_inv; "
        "the checkpoint is incomplete, download it again"
    )


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantize FP8 as q * scale per block, in float32 on the tensors' device. weight (R, C), scale (⌈R/b⌉, ⌈C/b⌉)."""
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    library = FP8BlockDequantizer(targets=["m"], weight_block_size=block, dtype=torch.float32)
    result: torch.Tensor = library.process({"m.weight": weight, "m.weight_scale_inv": scale})["m.weight"]
    return result


def read_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Read a linear module's weight as float32 on `device`.

    Args:
        module: its full published name, without `.weight`.

    Raises:
        CheckpointError: a tensor is missing, has a wrong dtype or shape, or contains NaN or infinity.
    """
    foreign = foreign_weight(checkpoint, module, device)
    if foreign is not None:
        weight = foreign
    elif f"{module}.weight_packed" in checkpoint.tensors:
        weight = _read_packed(checkpoint, module, device)
    else:
        info = checkpoint.require(f"{module}.weight", "a linear layer's weight")
        stored = checkpoint.tensor(info.name).to(device)
        if stored.dtype == FP8:
            weight = _read_fp8(checkpoint, module, stored)
        elif stored.is_floating_point() and stored.element_size() > 1:
            weight = stored.float()
        else:
            raise CheckpointError(
                f"{info.file}: {info.name}: dtype {info.dtype} is not that of a weight that can be read; give the "
                "published checkpoint"
            )
    if not bool(torch.isfinite(weight).all()):
        raise CheckpointError(
            f"{checkpoint.folder}: {module}.weight or its scale holds a NaN or infinity; download its shard again"
        )
    return weight


def _read_fp8(checkpoint: Checkpoint, module: str, stored: torch.Tensor) -> torch.Tensor:
    name = scale_name(checkpoint, module)
    info = checkpoint.tensors[name]
    block = block_size(checkpoint)
    if stored.dim() != 2:
        raise CheckpointError(
            f"{checkpoint.tensors[f'{module}.weight'].file}: {module}.weight has shape {list(stored.shape)}; "
            "FP8 in blocks has rows and columns"
        )
    expected = tuple(math.ceil(n / b) for n, b in zip(stored.shape, block, strict=True))
    if info.shape != expected:
        raise CheckpointError(
            f"{info.file}: {name} has shape {list(info.shape)}, but {list(stored.shape)} in blocks of "
            f"{list(block)} needs {list(expected)}"
        )
    return dequantize_fp8(stored, checkpoint.tensor(name).to(stored.device), block)


def _read_packed(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
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
    codes = unpack(packed, bits, (rows, columns)).float()
    return dequantize(codes, scale)


def _refuse_bias(checkpoint: Checkpoint, module: str) -> None:
    """Refuse a bias that the family's model would not add. AutoGPTQ writes one of zeros beside every weight."""
    info = checkpoint.tensors.get(f"{module}.bias")
    if info is not None and bool(checkpoint.tensor(info.name).any()):
        raise CheckpointError(
            f"{info.file}: {info.name} is not zero, but this family's model adds no bias there; the checkpoint is of "
            "another model, or was made with a correction that cannot be read here"
        )


def layer_weights(
    checkpoint: Checkpoint,
    facts: Architecture,
    sizes: Sizes,
    layer: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Read one decoder layer's parameters, with fused experts, by transformers' names within the layer.

    Returns:
        Norms, attention, router, `….gate_up_proj` (E, 2I, H) and `….down_proj` (E, H, I), in `dtype`, except what the
        family publishes in float32 (a router and its bias), which stays so. A dense layer has its MLP instead.
    """
    weights: dict[str, torch.Tensor] = {}
    dense = layer in sizes.dense
    for name, tensor in facts.tensors(dense).items():
        if name in facts.modules.without or (tensor.optional and facts.layer(layer, name) not in checkpoint.tensors):
            continue
        stored = checkpoint.tensor(checkpoint.require(facts.layer(layer, name), "a tensor of the layer").name)
        if not bool(torch.isfinite(stored.float()).all()):
            info = checkpoint.tensors[facts.layer(layer, name)]
            raise CheckpointError(f"{info.file}: {info.name} holds a NaN or infinity; download this shard again")
        target = torch.float32 if tensor.dtype == "F32" else dtype
        weights[facts.in_transformers(name)] = stored.to(device=device, dtype=target)
    for name in facts.linears(dense):
        if name in facts.modules.without:
            continue
        weight = read_weight(checkpoint, facts.layer(layer, name), device).to(dtype)
        weights[facts.in_transformers(name) + ".weight"] = weight
        if f"{name}.bias" not in facts.tensors(dense):
            _refuse_bias(checkpoint, facts.layer(layer, name))
    if dense:
        return weights
    experts, width, hidden = sizes["experts"], sizes["width"], sizes["hidden"]
    gate_up = torch.empty(experts, 2 * width, hidden, device=device, dtype=dtype)
    down = torch.empty(experts, hidden, width, device=device, dtype=dtype)
    for expert in range(experts):
        slots = (gate_up[expert, :width], gate_up[expert, width:], down[expert])
        for matrix, slot in zip(MATRICES, slots, strict=True):
            module = facts.expert(layer, expert, matrix)
            slot.copy_(read_weight(checkpoint, module, device))
            _refuse_bias(checkpoint, module)
    weights[f"{facts.modules.experts}.gate_up_proj"] = gate_up
    weights[f"{facts.modules.experts}.down_proj"] = down
    return weights
