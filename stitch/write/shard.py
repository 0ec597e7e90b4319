"""Turns a solved layer and the source's own bytes into one finished shard, written atomically."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.tensor_bytes import torch_dtype
from quantizers.plan.plan import KEPT, METADATA, Plan
from quantizers.solve.solved import Solved
from quantizers.system.atomic import disk_errors, sync_folder
from quantizers.system.errors import CheckpointError, QuantizeError

from .digests import ShardDigest, joined_digests, read_back, split


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
        if action.kind in KEPT:
            (name,) = action.outputs
            tensors[name] = source.tensor(action.source)
            continue
        if action.kind == "drop":
            continue
        assert solved is not None
        if action.kind == "fold":
            assert solved.norm is not None
            tensors[action.source] = solved.norm
        elif action.kind == "compensate":
            # If the router was not compensated (the library's published recipe, for comparison), its values are kept.
            router = source.tensor(action.source) if solved.router is None else solved.router
            tensors[action.source] = router.to(torch_dtype(action.outputs[action.source].dtype))
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


def check_finite(tensors: Mapping[str, torch.Tensor], where: str, carried: Collection[str] = ()) -> None:
    """Refuse to write a tensor that would break the model.

    Args:
        carried: the names of those that may hold anything: a mask may well be infinite.

    Raises:
        QuantizeError: the first tensor with a NaN or infinity.
    """
    for name, tensor in tensors.items():
        if name not in carried and tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise QuantizeError(f"{where}: {name} is not finite; nothing was written for this layer")


def write_shard(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    kept: Mapping[str, str] = MappingProxyType({}),
    carried: Collection[str] = (),
) -> ShardDigest:
    """Write a safetensors file, and read it back before it gets its final name.

    The tensors in memory prove nothing about the file, and those that are kept are the source's own memory. So the
    file is compared with the digests of what was to be written, and its kept tensors with the hashes that the source
    had when it was read.

    Args:
        tensors: on the CPU, contiguous.
        kept: SHA-256, hexadecimal, of the source's bytes for each tensor that keeps them.
        carried: see `check_finite`.

    Returns:
        The digests of the file.

    Raises:
        QuantizeError: a tensor is not finite, the disk is full or cannot be written, or the file holds other bytes.
    """
    check_finite(tensors, path.name, carried)
    expected = joined_digests(tensors)
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        temporary.touch()
        mode = temporary.stat().st_mode  # as the user's umask allows; save_file makes it readable by the owner only
        save_file(dict(tensors), temporary, metadata=METADATA)
        temporary.chmod(mode)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        try:
            found, hashes = read_back(temporary, kept)
        except CheckpointError as failure:
            raise QuantizeError(f"{failure}, though it was just written; check the disk") from None
        differing = [
            f"{name} has other bytes in the file than it was written with"
            for name, old, new in zip(sorted(tensors), split(expected), split(found["tensors"]), strict=True)
            if old != new
        ] + [f"{name} has other bytes than the source's" for name, wanted in kept.items() if hashes[name] != wanted]
        if differing:
            temporary.unlink()
            raise QuantizeError(
                f"{path.name}: {differing[0]}{f', and {len(differing) - 1} more' if len(differing) > 1 else ''}; check "
                "disk and memory, then give the same command again"
            )
        os.replace(temporary, path)
        sync_folder(path.parent)
    return found


def kept_hashes(plan: Plan, layer: int | None, source: Checkpoint) -> dict[str, str]:
    """SHA-256, hexadecimal, of the source's bytes for every tensor of a shard that keeps them."""
    actions = (action for action in plan.of_layer(layer) if action.kind in KEPT)
    return {name: source.sha256(action.source) for action in actions for name in action.outputs}
