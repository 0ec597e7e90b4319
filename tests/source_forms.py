"""Other forms in which a model is published, made from a tiny model of a family with matrices in bfloat16."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import families
import tiny
import torch
from runs import change
from whole_models import stored


def write_plain(folder: Path, family: str, layers: int = 2, **changes: Any) -> Path:
    """A model of the family in bfloat16."""
    return families.write(folder, family, num_hidden_layers=layers, quantization_config=None, **changes)


def write_variant(folder: Path, family: str, attention: str) -> Path:
    """The recipe of a model of the family, in BF16 where it is to become FP8, and its sets; experts are rounded to the
    nearest codes.
    """
    if attention == "bf16":
        recipe = families.write_job(folder, family, rounding="nearest")
    else:
        write_plain(folder / "model", family, 3)
        recipe = tiny.write_recipe(folder, words=20, samples=3, rounding="nearest")
    change(recipe, lambda body: body.update(attention=attention))
    return recipe


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
            made[name], made[f"{name}_scale"] = tiny.fp8_rows(tensor, dtype)
    return rewrite(folder, config | {"quantization_config": copy.deepcopy(families.PER_ROW)}, made)


def fused(plain: Path, folder: Path, seed: int = 0) -> Path:
    """A copy of a Mixtral in which transformers' own parameters hold the experts, all of a layer in two tensors."""
    config, tensors = stored(shutil.copytree(plain, folder))
    model = families.randomized(config, seed)  # as `families.write` makes it
    experts = {name: t.bfloat16() for name, t in model.state_dict().items() if ".mlp.experts." in name}
    return rewrite(folder, config, {name: t for name, t in tensors.items() if ".experts." not in name} | experts)


def packed_integers(plain: Path, folder: Path) -> Path:
    """A copy whose experts are INT4 in groups of 32, and all else is as it was: as Kimi-K2.5 is published."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    config, tensors = stored(shutil.copytree(plain, folder))
    made = {}
    for name, tensor in tensors.items():
        if ".experts." not in name or not name.endswith(".weight"):
            made[name] = tensor
            continue
        module, grouped = name.removesuffix(".weight"), tensor.float().unflatten(1, (-1, 32))
        scale = (grouped.abs().amax(2) / 7.5).clamp(min=1e-6).bfloat16()
        codes = (grouped / scale.float().unsqueeze(2)).round().clamp(-8, 7).to(torch.int8).flatten(1)
        made[f"{module}.weight_packed"] = pack_to_int32(codes, 4)
        made[f"{module}.weight_scale"], made[f"{module}.weight_shape"] = scale, torch.tensor(tensor.shape)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [r"re:.*\.experts\.\d+\.w[123]$"],
                "format": "pack-quantized",
                "weights": weights,
                "input_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    return rewrite(folder, config | {"quantization_config": section}, made)
