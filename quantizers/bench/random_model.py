"""Writes a checkpoint of random weights in a family's published layout, in any size, for benchmarks.

Legend: b rows and columns of an FP8 block.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import all_published, architecture_for, published_models
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.reader import CONFIG, SINGLE, Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.checkpoint.tensor_bytes import torch_dtype
from quantizers.plan.making import expected_tensors
from quantizers.plan.plan import METADATA
from quantizers.system.errors import InputError, did_you_mean

BLOCK = (128, 128)
OUTLIERS = 8  # number of outlier channels in a norm, and the factor that enlarges them


def published(like: str) -> dict[str, Any]:
    """The config.json of a model on the Hub whose facts are kept in this program.

    Args:
        like: its id, or the part after the slash, ignoring case: `minimax-m2.1`.

    Raises:
        InputError: no facts are kept for it; the message lists the models that have them.
    """
    for _, published in all_published():
        for model in published.models:
            if like.casefold() in (model.casefold(), model.partition("/")[2].casefold()):
                return published.config
    known = published_models()
    meant = did_you_mean(like.casefold(), [model.partition("/")[2].casefold() for model in known])
    raise InputError(f"--like {like}: no facts are kept for it{meant}; give one of {', '.join(known)}")


def resized(config: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """config.json with other sizes, by this program's names for them: layers, experts, hidden, width, …

    Layers that predict further tokens are left out: nothing is computed in them.
    """
    facts = architecture_for(config, CONFIG)
    without = {facts.mtp_layer.layers: 0} if facts.mtp_layer else {}
    return config | without | {facts.sizes[word].key: size for word, size in sizes.items()}


def write_random(folder: Path, config: dict[str, Any], device: torch.device, seed: int = 0) -> Checkpoint:
    """Write the checkpoint that a config.json describes, with random weights, and open it.

    Norms have outlier channels; linear weights are scaled by 1/√columns, which preserves the length of a vector.
    Creates the folder, and writes one safetensors file.

    Args:
        device: where random numbers are drawn; they differ between devices.
    """
    facts = architecture_for(config, CONFIG)
    sizes = sizes_of(facts, config, CONFIG)
    generator = torch.Generator(device).manual_seed(seed)
    specs = expected_tensors(facts, sizes, config, CONFIG)
    tensors = {name: _draw(name, spec, facts, specs, generator) for name, spec in specs.items()}
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / SINGLE, metadata=METADATA)
    return open_folder(folder)


def _draw(
    name: str, spec: Spec, facts: Architecture, specs: dict[str, Spec], generator: torch.Generator
) -> torch.Tensor:
    module, _, suffix = name.rpartition(".")
    if suffix in ("weight_scale_inv", "weight_scale"):
        # FP8 codes are normal with standard deviation 64; the weights' is 1/√columns.
        return torch.full(spec.shape, specs[f"{module}.weight"].shape[1] ** -0.5 / 64, dtype=torch_dtype(spec.dtype))
    drawn = torch.randn(spec.shape, generator=generator, device=generator.device)
    if spec.dtype == "F8_E4M3":
        return (drawn * 64).clamp_(-448, 448).to(torch.float8_e4m3fn).cpu()
    dtype = torch_dtype(spec.dtype)
    if len(spec.shape) == 1:
        drawn = 0.02 * drawn if suffix.endswith("bias") else 1 + 0.2 * drawn
        if suffix == "weight":
            drawn[:: max(1, drawn.numel() // OUTLIERS)] *= OUTLIERS
        return drawn.to(dtype).cpu()
    vocabulary_matrix = name in (facts.embedding, facts.head)
    return (drawn * (1 if vocabulary_matrix else spec.shape[1] ** -0.5)).to(dtype).cpu()
