"""A checkpoint of random weights in a family's published layout: as large as one wants, for measuring.

Legend: b rows and columns of an FP8 block.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantizers.architectures.architecture import Architecture, architecture_for, known, published_config, sizes_of
from quantizers.checkpoint.reader import CONFIG, SINGLE, Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.plan.plan import METADATA, expected_tensors
from quantizers.system.errors import InputError

BLOCK = (128, 128)
OUTLIERS = 8  # every so-manieth channel of a norm is so many times as large: what AWQ is for


def published(like: str) -> dict[str, Any]:
    """The config.json of a model on the Hub whose facts are kept here.

    Args:
        like: its id, or the part after the slash, in any case: `minimax-m2.1`.

    Raises:
        InputError: there are no such facts; those that there are are named.
    """
    models = [model for path in known().values() for model in _models(path.stem)]
    for model in models:
        if like.casefold() in (model.casefold(), model.partition("/")[2].casefold()):
            found = published_config(model)
            assert found is not None
            return found[1]
    raise InputError(f"--like {like}: no facts are kept for it; give one of {', '.join(models)}")


def _models(model_type: str) -> list[str]:
    facts = architecture_for({"model_type": model_type}, model_type)
    return facts.published.models if facts.published else []


def resized(config: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """config.json with other sizes, by our words for them: layers, experts, hidden, width, …"""
    facts = architecture_for(config, CONFIG)
    return config | {facts.sizes[word]: size for word, size in sizes.items()}


def write_random(folder: Path, config: dict[str, Any], device: torch.device, seed: int = 0) -> Checkpoint:
    """Write the checkpoint that a config.json describes, with random weights, and open it.

    Norms have outlier channels and linear weights the size that keeps a vector's length. One file; the
    folder is made.

    Args:
        device: where random numbers are drawn; they differ between devices.
    """
    facts = architecture_for(config, CONFIG)
    sizes = sizes_of(facts, config, CONFIG)
    generator = torch.Generator(device).manual_seed(seed)
    specs = expected_tensors(facts, sizes, BLOCK)
    tensors = {name: _draw(name, spec, facts, specs, generator) for name, spec in specs.items()}
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / SINGLE, metadata=METADATA)
    return open_folder(folder)


def _draw(
    name: str, spec: Spec, facts: Architecture, specs: dict[str, Spec], generator: torch.Generator
) -> torch.Tensor:
    module, _, suffix = name.rpartition(".")
    if suffix == "weight_scale_inv":  # normal codes of standard deviation 64 become weights of size 1/√columns
        return torch.full(spec.shape, specs[f"{module}.weight"].shape[1] ** -0.5 / 64)
    drawn = torch.randn(spec.shape, generator=generator, device=generator.device)
    if spec.dtype == "F8_E4M3":
        return (drawn * 64).clamp_(-448, 448).to(torch.float8_e4m3fn).cpu()
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(spec.dtype, torch.float32)
    if len(spec.shape) == 1:
        drawn = 0.02 * drawn if suffix.endswith("bias") else 1 + 0.2 * drawn
        if suffix == "weight":
            drawn[:: max(1, drawn.numel() // OUTLIERS)] *= OUTLIERS
        return drawn.to(dtype).cpu()
    table = name in (facts.embedding, facts.head)
    return (drawn * (1 if table else spec.shape[1] ** -0.5)).to(dtype).cpu()
