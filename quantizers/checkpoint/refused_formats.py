"""Formats of other tools that are not read here, each refused with what to do instead.

To read one of these as one of the known formats would silently give wrong weights. Some are no safetensors at all
(GGUF), others have codebooks or rotations of their own (EXL3, QuIP#), or 4-bit floats (NVFP4, MXFP4), so each has its
own program that runs it, and that program can also measure it.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.system.errors import CheckpointError

from .integer_words_config import METHODS, read_words

READ = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"}
SECTION = "quantization_config"
HERE = "here give the checkpoint that it was made from"
GGUF = f"evaluate it with llama.cpp's llama-perplexity --kl-divergence; {HERE}"
DEQUANTIZE = (
    "load it with transformers, and save what model.dequantize() returns with save_pretrained; give that folder"
)
# By quant_method: what to do instead.
INSTEAD = {
    "gguf": GGUF,
    "exl2": f"evaluate it with exllamav2's test_inference.py --eval_dataset; {HERE}",
    "exl3": f"evaluate it with exllamav3's eval/model_diff.py; {HERE}",
    "bitsandbytes": DEQUANTIZE,
    "higgs": DEQUANTIZE,
}
OTHERWISE = f"evaluate it with the program that made it; {HERE}"
MLX = f"evaluate it with mlx-lm; {HERE}"


def refuse_gguf(model: str) -> None:
    """Refuse a GGUF file, a folder that has such files and no safetensors, and a Hub id that ends in GGUF.

    Raises:
        CheckpointError: one line with what to do instead.
    """
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        names = sorted(os.listdir(folder))
        found = [name for name in names if name.lower().endswith(".gguf")]
        if found and not any(name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{os.path.join(folder, found[0])}: GGUF is not read here; {GGUF}")
    elif model.lower().endswith((".gguf", "-gguf", "_gguf")):
        raise CheckpointError(f"{model}: GGUF is not read here; {GGUF}")


def refuse_unread(config: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint whose config.json says that its weights are in a format that is not read here.

    Args:
        config: config.json, in which nothing is checked yet.
        where: its path, for the message.

    Raises:
        CheckpointError: one line that names the key, with what to do instead.
    """
    section = config.get(SECTION)
    mlx = config.get("quantization")
    if isinstance(mlx, Mapping) and {"bits", "group_size"} <= mlx.keys() and "quant_method" not in (section or {}):
        raise CheckpointError(f"{where}: quantization is MLX's, which is not read here; {MLX}")
    if isinstance(section, Mapping):
        if section.get("quant_method") in METHODS:
            read_words(section, f"{where}: {SECTION}")
            return
        for problem in _problems(section):
            raise CheckpointError(f"{where}: {SECTION}: {problem}")


def _problems(section: Mapping[str, Any]) -> Iterator[str]:
    method = section.get("quant_method", "compressed-tensors")
    if method not in ("fp8", "compressed-tensors"):
        instead = INSTEAD.get(method.lower(), OTHERWISE) if isinstance(method, str) else OTHERWISE
        yield f"quant_method is {reprlib.repr(method)}, which is not read here; {instead}"
    groups = section.get("config_groups")
    used = [section.get("format")]
    used += (
        [group.get("format") for group in groups.values() if isinstance(group, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    for name in used:
        if name is not None and name not in READ:
            yield f"format {reprlib.repr(name)} is none of {', '.join(sorted(READ))}; {OTHERWISE}"
    if section.get("transform_config"):
        yield f"transform_config rotates activations while the model runs, which is not done here; {OTHERWISE}"
    sparsity = section.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        yield f"sparsity_config has format {reprlib.repr(sparsity['format'])}, which is not read here; {OTHERWISE}"
