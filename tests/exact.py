"""Sources of which every expert's value is an E2M1 number times a power of two, so that several formats hold it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from low_bits import E2M1
from torch import Tensor

VALUES = torch.tensor(E2M1)
GROUP = 32


def matrix(rows: int, columns: int, generator: torch.Generator, powers: tuple[int, int] = (-9, -4)) -> Tensor:
    """Random E2M1 numbers, each group of 32 times one of these powers of two, float32."""
    signs = 1 - 2 * torch.randint(2, (rows, columns), generator=generator)
    codes = VALUES[torch.randint(len(VALUES), (rows, columns), generator=generator)] * signs
    exponents = torch.randint(powers[0], powers[1] + 1, (rows, columns // GROUP), generator=generator)
    return codes * torch.exp2(exponents.float()).repeat_interleave(GROUP, 1)


def write_exact(folder: Path, layers: int = 2, hidden: int = 256) -> Path:
    """A model in bfloat16 of whose linear matrices every value is such a number."""
    config = tiny.config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=128, quantization_config=None)
    tensors, generator = tiny.tensors(config), torch.Generator().manual_seed(2)
    for scale in [name for name in tensors if name.endswith("_scale_inv")]:
        name = scale.removesuffix("_scale_inv")
        tensors[name] = matrix(*tensors[name].shape, generator).bfloat16()
        del tensors[scale]
    return write_tokenizer(tiny.write(folder, config, tensors))


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes and scales of FP8 blocks, powers of two, of values that have some."""
    rows, columns = (size // 128 for size in weight.shape)
    blocks = weight.view(rows, 128, columns, 128)
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax((1, 3)))) - 7)
    codes = (blocks / scale[:, None, :, None]).view_as(weight).to(torch.float8_e4m3fn)
    return codes, scale


def write(folder: Path, form: str = "bf16", layers: int = 2, hidden: int = 128, **experts: Any) -> Path:
    """A recipe that converts, and its model, whose experts are `bf16` or `fp8` beside attention in FP8."""
    config = tiny.config(num_hidden_layers=layers, hidden_size=hidden, intermediate_size=128)
    tensors, generator = tiny.tensors(config), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        weight, scale = matrix(*tensors[name].shape, generator), f"{name}_scale_inv"
        if form == "fp8":
            tensors[name], tensors[scale] = in_blocks(weight)
        else:
            tensors[name] = weight.bfloat16()
            del tensors[scale]
    write_tokenizer(tiny.write(folder / "model", config, tensors))
    recipe = {"source": {"model": "model"}, "experts": experts}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"
