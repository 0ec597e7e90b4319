"""Reads the integer scheme of packed experts from the shapes of their tensors."""

from __future__ import annotations

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.recipe.schema import BITS, GROUPS, Scheme
from quantizers.system.errors import CheckpointError


def stored_schemes(experts: Checkpoint, facts: Architecture, sizes: Sizes) -> list[Scheme]:
    """`scheme_of` every layer; a layer without experts has that of the first layer with experts.

    Raises:
        CheckpointError: see `scheme_of`.
    """
    found = {layer: scheme_of(experts, facts, layer) for layer in sizes.moe_layers}
    return [found.get(layer, found[sizes.moe_layers[0]]) for layer in range(sizes["layers"])]


def scheme_of(experts: Checkpoint, facts: Architecture, layer: int) -> Scheme:
    """The integer scheme of a layer in an experts-only checkpoint, from its tensors (under published names).

    Raises:
        CheckpointError: its experts are not packed symmetric integers of a supported bit width and group size.
    """
    module = facts.expert(layer, 0, "gate")
    where = f"{experts.folder}: {module}"
    for part in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{part}" in experts.tensors:
            raise CheckpointError(f"{where}.{part}: asymmetric or reordered integers cannot be stitched")
    if f"{module}.qweight" in experts.tensors:
        raise CheckpointError(
            f"{where}.qweight: experts in the words of AutoAWQ or GPTQ cannot be stitched; give symmetric ones in "
            "compressed-tensors' pack-quantized, as llm-compressor saves them"
        )
    packed = experts.require(f"{module}.weight_packed", "its experts must be packed integers")
    scale = experts.require(f"{module}.weight_scale", "the scales of packed integers")
    shape = experts.tensor(experts.require(f"{module}.weight_shape", "the shape of packed integers").name).tolist()
    if len(packed.shape) != 2 or len(scale.shape) != 2 or len(shape) != 2 or not scale.shape[1] or not shape[1]:
        raise CheckpointError(
            f"{where}: packed {list(packed.shape)} and scale {list(scale.shape)} do not belong together"
        )
    bits, group = packed.shape[1] * 32 // shape[1], shape[1] // scale.shape[1]
    if bits not in BITS or group not in GROUPS:
        raise CheckpointError(
            f"{where}: INT{bits} in groups of {group}; 4 or 8 bits in groups of 32, 64 or 128 are needed"
        )
    return Scheme(bits, group)
