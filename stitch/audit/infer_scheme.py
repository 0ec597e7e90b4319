"""The integer scheme of each layer's experts: as the config declares it, or as the tensors' shapes show it."""

from __future__ import annotations

import re

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.recipe.schema import BITS, GROUPS, Scheme
from quantizers.system.errors import CheckpointError


def layer_schemes(checkpoint: Checkpoint, renamed: Checkpoint, facts: Architecture, sizes: Sizes) -> list[Scheme]:
    """Each layer's scheme, from quantization_config, or from the tensors if that declares none.

    A layer without experts gets the scheme of the first layer with experts.

    Args:
        checkpoint: as stored.
        renamed: the same under published names.

    Raises:
        CheckpointError: as `stored_schemes`.
    """
    return declared_schemes(checkpoint, facts, sizes) or stored_schemes(renamed, facts, sizes)


def declared_schemes(checkpoint: Checkpoint, facts: Architecture, sizes: Sizes) -> list[Scheme] | None:
    """Each layer's scheme, from quantization_config: of several integer groups the first that matches expert 0.

    Returns:
        None if no group targets integer experts, or none matches some layer.
    """
    groups = _expert_groups(checkpoint)
    if len(groups) == 1:
        return [groups[0][1]] * sizes["layers"]
    first = sizes.moe_layers[0]
    names = [facts.expert(first if n in sizes.dense else n, 0, "gate") for n in range(sizes["layers"])]
    matched = [next((s for targets, s in groups if any(_matches(t, name) for t in targets)), None) for name in names]
    schemes = [scheme for scheme in matched if scheme is not None]
    return schemes if len(schemes) == sizes["layers"] else None


def _matches(target: str, name: str) -> bool:
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _expert_groups(checkpoint: Checkpoint) -> list[tuple[list[str], Scheme]]:
    """The expert targets and the scheme of each config group of integer experts."""
    section = checkpoint.config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, dict) else None
    result: list[tuple[list[str], Scheme]] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list) or weights.get("type") != "int":
            continue
        expert_targets = [target for target in targets if isinstance(target, str) and "experts" in target]
        bits, group_size = weights.get("num_bits"), weights.get("group_size")
        if expert_targets and bits in BITS and group_size in GROUPS:
            result.append((expert_targets, Scheme(bits, group_size)))
    return result


def stored_schemes(experts: Checkpoint, facts: Architecture, sizes: Sizes) -> list[Scheme]:
    """Each layer's scheme, from the shapes of its expert 0's tensors (under published names).

    Raises:
        CheckpointError: they are not packed symmetric integers of a supported bit width and group size.
    """
    schemes = {layer: _stored_scheme(experts, facts, layer) for layer in sizes.moe_layers}
    return [schemes.get(layer, schemes[sizes.moe_layers[0]]) for layer in range(sizes["layers"])]


def _stored_scheme(experts: Checkpoint, facts: Architecture, layer: int) -> Scheme:
    module = facts.expert(layer, 0, "gate")
    where = f"{experts.folder}: {module}"
    for part in ("weight_zero_point", "weight_g_idx"):
        if f"{module}.{part}" in experts.tensors:
            raise CheckpointError(f"{where}.{part}: asymmetric or reordered integers are not supported")
    if f"{module}.qweight" in experts.tensors:
        raise CheckpointError(
            f"{where}.qweight: experts of AutoAWQ or GPTQ cannot be stitched; give symmetric ones in "
            "compressed-tensors' pack-quantized, as llm-compressor saves them"
        )
    packed = experts.require(f"{module}.weight_packed", "its experts must be packed integers")
    scale = experts.require(f"{module}.weight_scale", "the scales of packed integers")
    shape = experts.tensor(experts.require(f"{module}.weight_shape", "the shape of packed integers").name).tolist()
    if len(packed.shape) != 2 or len(scale.shape) != 2 or len(shape) != 2 or not scale.shape[1] or not shape[1]:
        raise CheckpointError(
            f"{where}: packed {list(packed.shape)} and scale {list(scale.shape)} do not fit each other"
        )
    bits, group = packed.shape[1] * 32 // shape[1], shape[1] // scale.shape[1]
    if bits not in BITS or group not in GROUPS:
        raise CheckpointError(
            f"{where}: INT{bits} in groups of {group}; 4 or 8 bits in groups of 32, 64 or 128 are needed"
        )
    return Scheme(bits, group)
