"""Turns a solved layer and the source's own bytes into one finished shard, written atomically."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from quantizers.checkpoint.reader import Checkpoint
from quantizers.plan.plan import METADATA, Plan
from quantizers.solve.solved import Solved
from quantizers.system.atomic import disk_errors, sync_folder
from quantizers.system.errors import QuantizeError

from .digests import ShardDigest, joined_digests


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes (R, C) int8 as int32 words (R, C * bits / 32), packed by compressed-tensors."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    packed: torch.Tensor = pack_to_int32(codes, bits)
    return packed


def layer_tensors(plan: Plan, layer: int | None, source: Checkpoint, solved: Solved | None) -> dict[str, torch.Tensor]:
    """Every tensor of one output shard, on the CPU.

    Args:
        layer: a decoder layer, or None for the tensors outside the layers.
        solved: needed if the plan quantizes, folds or compensates in this layer.
    """
    tensors: dict[str, torch.Tensor] = {}
    for action in plan.of_layer(layer):
        if action.kind in ("keep", "rename"):
            (name,) = action.outputs
            tensors[name] = source.tensor(action.source)
            continue
        if action.kind == "drop":
            continue
        assert solved is not None
        if action.kind == "fold":
            tensors[action.source] = solved.norm
        elif action.kind == "compensate":
            # If the router was not compensated (the library's published recipe, for comparison), its values are kept.
            tensors[action.source] = source.tensor(action.source).float() if solved.router is None else solved.router
        else:
            assert action.matrix is not None
            assert action.expert is not None
            assert layer is not None
            module = action.source.removesuffix(".weight")
            bits = plan.schemes[layer].bits
            tensors[f"{module}.weight_packed"] = pack(solved.codes[action.matrix][action.expert], bits)
            tensors[f"{module}.weight_scale"] = solved.scales[action.matrix][action.expert]
            tensors[f"{module}.weight_shape"] = torch.tensor(action.spec.shape, dtype=torch.int64)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def check_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse to write a tensor that would break the model.

    Raises:
        QuantizeError: the first tensor with a NaN or infinity.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise QuantizeError(f"{where}: {name} is not finite; nothing was written for this layer")


def write_shard(tensors: Mapping[str, torch.Tensor], path: Path) -> ShardDigest:
    """Write a safetensors file, which gets its final name only once it is complete and on disk.

    Args:
        tensors: on the CPU, contiguous.

    Returns:
        The digests of the file, and of its tensors as they were in memory.

    Raises:
        QuantizeError: the disk is full or cannot be written.
    """
    check_finite(tensors, path.name)
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask allows; save_file makes it readable by the owner only
        save_file(dict(tensors), temporary, metadata=METADATA)
        temporary.chmod(mode)
        with temporary.open("rb+") as stream:
            whole = hashlib.file_digest(stream, "sha256").hexdigest()
            os.fsync(stream.fileno())
            size = stream.tell()
        os.replace(temporary, path)
        sync_folder(path.parent)
    return {"bytes": size, "sha256": whole, "tensors": joined_digests(tensors)}
