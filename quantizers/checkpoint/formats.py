"""Reads checkpoints of other tools: module names and weight formats.

    integers with a scale per tensor, row or group      weight int8, weight_scale (, weight_zero_point int8)
    FP8 with a scale per tensor, row, group or block    weight, weight_scale
    packed integers with zero points                    weight_packed, weight_scale, weight_shape, weight_zero_point
    integers of AutoAWQ, GPTQ and AutoRound             see awq_gptq.py

compressed-tensors' pack-quantized, int-quantized, float-quantized and naive-quantized are among these or those of
forward/weights.py. Other formats are refused in unsupported.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import sizes_of
from quantizers.system.errors import CheckpointError

from .awq_gptq import dequantize_awq_gptq, is_awq_or_gptq
from .fp8 import blocks_of
from .fused_experts import is_fused, with_experts_apart
from .reader import Checkpoint, block_size
from .safetensors_header import FP8
from .unsupported import refuse_unsupported

if TYPE_CHECKING:
    import torch

    from .safetensors_header import TensorInfo

# Legend: R rows, C columns, n groups per row


def readable(checkpoint: Checkpoint, facts: Architecture) -> Checkpoint:
    """The checkpoint under the family's published tensor names, with fused experts split.

    Maps llm-compressor's names of the experts (gate_proj, up_proj, down_proj) and transformers' names of modules
    (`mlp.` for `block_sparse_moe.`).

    Raises:
        CheckpointError: its format or its experts' layout is not supported, or two tensors get the same name.
    """
    where = f"{checkpoint.folder}/config.json"
    refuse_unsupported(checkpoint.config, where)
    qweight = next((name for name in checkpoint.tensors if name.endswith(".qweight")), None)
    if qweight is not None and not is_awq_or_gptq(checkpoint.config):
        raise CheckpointError(
            f"{where}: does not declare the AutoAWQ or GPTQ integers in the files ({qweight}); copy their "
            "quantization_config from quant_config.json or quantize_config.json, and add its quant_method"
        )
    tensors: dict[str, TensorInfo] = {}
    kinds = [part for dense in (False, True) for part in (facts.tensors(dense), facts.linears(dense))]
    known = {name for kind in kinds for name in kind}
    for name, info in checkpoint.tensors.items():
        published = _published(name, facts, known)
        if published in tensors:
            raise CheckpointError(f"{info.file}: {name} and {tensors[published].name} are the same tensor; keep one")
        tensors[published] = info
    renamed = replace(checkpoint, tensors={name: replace(info, name=name) for name, info in tensors.items()})
    if any(map(is_fused, tensors)):
        return with_experts_apart(renamed, facts, sizes_of(facts, checkpoint.config, where))
    return renamed


def _published(name: str, facts: Architecture, known: Collection[str]) -> str:
    within = re.sub(r"^.*?\.\d+\.", "", name)  # without the layer's prefix
    if within in known or within.rpartition(".")[0] in known:
        return name  # as published, although it may begin as a module of transformers' does
    for published, module in facts.modules.rename.items():
        name = name.replace(f".{module}.", f".{published}.", 1)
    for alias, published in facts.modules.aliases.items():
        if name.endswith(f".{alias}"):
            name = name.removesuffix(alias) + published
    expert = re.search(r"\.experts\.\d+\.(\w+)\.", name)
    if expert:
        for matrix in MATRICES:
            if expert[1] == PROJECTIONS[matrix]:
                at, end = expert.span(1)
                name = name[:at] + facts.expert_linears[matrix].name + name[end:]
    return name


def foreign_weight(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor | None:
    """A module's weight (R, C) in float32 on `device`, dequantized from one of the formats above.

    Returns:
        The weight, or None if its format is one of forward/weights.py.

    Raises:
        CheckpointError: the module's tensors do not fit each other.
    """
    if f"{module}.qweight" in checkpoint.tensors:
        return dequantize_awq_gptq(checkpoint, module, device)
    parts = {part: checkpoint.tensors.get(f"{module}.{part}") for part in _PARTS}
    scale, weight = parts["weight_scale"], parts["weight"]
    if parts["weight_packed"] is not None:
        asymmetric = parts["weight_zero_point"] is not None and not _all_symmetric(checkpoint)
        return _asymmetric(checkpoint, module, device) if asymmetric else None
    if weight is None or scale is None or len(weight.shape) != 2:
        return None
    if weight.dtype not in ("I8", FP8):
        return None
    if weight.dtype == FP8 and scale.shape == blocks_of(weight.shape, block_size(checkpoint)):
        return None
    codes = checkpoint.tensor(weight.name).to(device).float()
    zero = parts["weight_zero_point"]
    if zero is not None:
        codes -= _spread(checkpoint, zero, weight, device)
    return codes.mul_(_spread(checkpoint, scale, weight, device))


_PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point")


def _spread(checkpoint: Checkpoint, scale: TensorInfo, weight: TensorInfo, device: torch.device) -> torch.Tensor:
    """A scale or zero point in float32, expanded so that it broadcasts to the weight's shape (R, C)."""
    rows, columns = weight.shape
    values = checkpoint.tensor(scale.name).to(device).float()
    if values.numel() == 1:
        return values.view(1, 1)
    if scale.shape in ((rows,), (rows, 1)):
        return values.view(rows, 1)
    if len(scale.shape) == 2 and scale.shape[0] == rows and columns % scale.shape[1] == 0:
        return values.repeat_interleave(columns // scale.shape[1], dim=1)
    block = _declared_block(checkpoint)
    if block is not None and scale.shape == blocks_of(weight.shape, block):
        return values.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    raise CheckpointError(
        f"{scale.file}: {scale.name} has shape {list(scale.shape)}; one number, or one per row, group or declared "
        f"block of {list(weight.shape)} is needed"
    )


def _weight_schemes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The `weights` entry of every config group."""
    section = checkpoint.config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, dict) else None
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    return [weights for weights in schemes if isinstance(weights, dict)]


def _all_symmetric(checkpoint: Checkpoint) -> bool:
    return all(weights.get("symmetric", True) for weights in _weight_schemes(checkpoint))


def _declared_block(checkpoint: Checkpoint) -> tuple[int, int] | None:
    """The `block_structure` of the first config group that has one."""
    for weights in _weight_schemes(checkpoint):
        block = weights.get("block_structure")
        if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
            return block[0], block[1]
    return None


def _asymmetric(checkpoint: Checkpoint, module: str, device: torch.device) -> torch.Tensor:
    """Dequantize as (code - zero) * scale. The zero points (R, n) are packed along the rows."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    packed, scale, shape, zero = (
        checkpoint.tensor(checkpoint.require(f"{module}.{name}", "a packed weight with zero points").name)
        for name in names
    )
    rows, columns = [int(n) for n in shape.flatten().tolist()] if shape.numel() == 2 else (0, 0)
    bits = packed.shape[-1] * 32 // columns if packed.dim() == 2 and columns > 0 else 0
    groups = scale.shape[-1] if scale.dim() == 2 else 0
    if (
        bits not in (4, 8)
        or packed.shape != (rows, columns * bits // 32)
        or not groups
        or scale.shape != (rows, groups)
        or columns % groups
        or zero.shape != (math.ceil(rows * bits / 32), groups)
        or zero.dtype != packed.dtype
        or f"{module}.weight_g_idx" in checkpoint.tensors
    ):
        raise CheckpointError(
            f"{checkpoint.folder}: {module}: packed {list(packed.shape)}, scale {list(scale.shape)}, zero point "
            f"{list(zero.shape)} and weight_shape {[rows, columns]} do not fit each other"
        )
    codes = unpack_from_int32(packed.to(device), bits, torch.Size((rows, columns))).float()
    zeros = unpack_from_int32(zero.to(device), bits, torch.Size((rows, groups)), packed_dim=0).float()
    shifted = codes.view(rows, groups, -1) - zeros.unsqueeze(-1)
    weight: torch.Tensor = (shifted * scale.to(device).float().unsqueeze(-1)).view(rows, columns)
    return weight
