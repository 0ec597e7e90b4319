"""Other forms in which a model is published, made from a tiny model of a family with matrices in bfloat16."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import tiny
import torch
from whole_models import stored

ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
PER_ROW = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": [r"re:.*_proj$"],  # GLM's says Linear; names tell the library's functions which module is one
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": ACTIVATIONS,
            "format": "float-quantized",
        }
    },
    "ignore": ["lm_head"],
}


def write_plain(folder: Path, family: str, layers: int = 2, **changes: Any) -> Path:
    """A model of the family in bfloat16."""
    return families.write(folder, family, num_hidden_layers=layers, quantization_config=None, **changes)


def rewrite(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return tiny.write(folder, config, tensors)


def per_row(plain: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A copy in which every linear matrix is FP8 with a scale for each row, as GLM is published."""
    config, tensors = stored(shutil.copytree(plain, folder))
    made = {}
    for name, tensor in tensors.items():
        made[name] = tensor
        if name.endswith("_proj.weight"):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 448).to(dtype)
            made[name] = (tensor.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
            made[f"{name}_scale"] = scale
    return rewrite(folder, config | {"quantization_config": json.loads(json.dumps(PER_ROW))}, made)


def fused(plain: Path, folder: Path, seed: int = 0) -> Path:
    """A copy of a Mixtral in which transformers' own parameters hold the experts, all of a layer in two tensors."""
    config, tensors = stored(shutil.copytree(plain, folder))
    model = families.randomized(families.in_transformers(config), seed)  # as `families.write` makes it
    experts = {name: t.bfloat16() for name, t in model.state_dict().items() if ".mlp.experts." in name}
    return rewrite(folder, config, {name: t for name, t in tensors.items() if ".experts." not in name} | experts)
