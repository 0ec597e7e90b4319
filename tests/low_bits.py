"""Checkpoints in MXFP8, MXFP4, NVFP4 and FP8 blocks with E8M0 scales, as published, made from one in bfloat16; and
their numbers, element by element from the bits.

`rewrite_as` rounds to the nearest, with names and config.json of the releases that `LAYOUTS` names; `weights_of` reads
any of them back without this program or compressed-tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from source_forms import rewrite
from torch import Tensor
from whole_models import stored

Parts = dict[str, Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MATRICES = (
    "_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight", ".wq_a.weight", ".wq_b.weight", ".wkv.weight",
    ".wo_b.weight",
)  # fmt: skip


# Rounding ------------------------------------------------------------------------------------------------------------


def powers(weight: Tensor, rows: int, columns: int, largest: int) -> Tensor:
    """The bytes of E8M0 scales of blocks; `largest` is the exponent of the codes' largest number."""
    blocks = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    peak = blocks.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax((1, 3))
    exponent = torch.where(peak > 0, torch.frexp(peak)[1] - 1 - largest, -127)
    return (exponent + 127).clamp(0, 254).to(torch.uint8)


def spread(scale: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(columns, 1)[:, : shape[1]]


def nibbles(x: Tensor) -> Tensor:
    """The nearest E2M1 codes of (R, C), two a byte, the even column in the low half: uint8 (R, C / 2)."""
    code = (x.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
    return code[:, ::2] | code[:, 1::2] << 4


def fp8_codes(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def mx(weight: Tensor, bits: int, rows: int = 1, columns: int = 32) -> tuple[Tensor, Tensor]:
    """Codes F8_E4M3 (R, C) or uint8 (R, C / 2), and uint8 scales."""
    scale = powers(weight, rows, columns, 8 if bits == 8 else 2)
    scaled = weight.float() / spread(torch.exp2(scale.float() - 127), rows, columns, weight.shape)
    return (fp8_codes(scaled) if bits == 8 else nibbles(scaled)), scale


def nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ModelOpt's codes uint8 (R, C / 2), scales F8_E4M3 (R, C / 16) and scale of the matrix ()."""
    grouped = weight.float().unflatten(1, (-1, 16))
    whole = weight.float().abs().max() / (6 * 448)
    scale = fp8_codes((grouped.abs().amax(2) / 6 / whole).clamp(min=2**-9))
    return nibbles((grouped / (scale.float() * whole)[..., None]).flatten(1)), scale, whole


# Layouts -------------------------------------------------------------------------------------------------------------


def as_e8m0(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu)


def _parts(codes: str, scale: str, bits: int, *, rows: int = 1, columns: int = 32, ds: bool = False) -> Any:
    def make(weight: Tensor) -> Parts:
        q, s = mx(weight, bits, rows, columns)
        return {codes: q.view(torch.int8) if ds and bits == 4 else q, scale: as_e8m0(s) if ds else s}

    return make


def _modelopt(weight: Tensor) -> Parts:
    codes, scale, whole = nvfp4(weight)
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.0123)}


def _compressed(name: str, bits: int, activations: bool) -> dict[str, Any]:
    """A section of compressed-tensors 0.19, as llm-compressor's presets write it."""
    weights = {
        "num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    }  # fmt: skip
    inputs = weights | {"dynamic": True} if activations else None
    group = {"targets": ["Linear"], "format": name, "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head", "re:.*gate$"],
    }  # fmt: skip


def _of_modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    """As config.json of ModelOpt's newer releases has it."""
    producer = {"name": "modelopt", "version": "0.44.0"}
    section = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "producer": producer}
    return {"quantization_config": section | more}


@dataclass(frozen=True)
class Layout:
    """How a release stores experts, and other linear modules; `config` is what its config.json says of it."""

    experts: Callable[[Tensor], Parts]
    others: Callable[[Tensor], Parts]
    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)


MXFP8 = _parts("weight", "weight_scale", 8)
MXFP8_INVERSE = _parts("weight", "weight_scale_inv", 8)
MXFP4 = _parts("weight_packed", "weight_scale", 4)
DEEPSEEK_BLOCKS = _parts("weight", "scale", 8, rows=128, columns=128, ds=True)
DEEPSEEK_MXFP4 = _parts("weight", "scale", 4, ds=True)
INVERSE_BLOCKS = _parts("weight", "weight_scale_inv", 8, rows=128, columns=128, ds=True)
BLOCKS = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
MINIMAX = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "mxfp8", "scale_fmt": "ue8m0",
    "weight_block_size": [1, 32], "ignored_layers": ["lm_head", "model.embed_tokens"],
}  # fmt: skip
QUARK = {
    "quant_method": "quark", "exclude": ["lm_head"],
    "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
    },
}  # fmt: skip
HF_QUANT = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip
LAYOUTS = {
    "MXFP8 of compressed-tensors": Layout(
        MXFP8, MXFP8, {"quantization_config": _compressed("mxfp8-quantized", 8, activations=True)}
    ),
    "MXFP8 of MiniMax": Layout(MXFP8_INVERSE, MXFP8_INVERSE, {"quantization_config": MINIMAX}),
    "MXFP8 of ModelOpt": Layout(MXFP8, MXFP8, _of_modelopt("MXFP8")),
    "E8M0 blocks": Layout(INVERSE_BLOCKS, INVERSE_BLOCKS, {"quantization_config": BLOCKS}),
    "MXFP4 of compressed-tensors": Layout(
        MXFP4, MXFP4, {"quantization_config": _compressed("mxfp4-pack-quantized", 4, activations=False)}
    ),
    "MXFP4 of DeepSeek": Layout(
        DEEPSEEK_MXFP4, DEEPSEEK_BLOCKS, {"expert_dtype": "fp4", "quantization_config": BLOCKS}
    ),
    "MXFP4 of Quark": Layout(
        _parts("weight", "weight_scale", 4), _parts("weight", "weight_scale", 4), {"quantization_config": QUARK}
    ),
    "NVFP4 of ModelOpt": Layout(_modelopt, _modelopt, _of_modelopt("NVFP4")),
    "NVFP4 of ModelOpt, declared beside": Layout(
        _modelopt, _modelopt, {"quantization_config": None}, {"hf_quant_config.json": HF_QUANT}
    ),
    "NVFP4 of ModelOpt with MXFP8": Layout(_modelopt, MXFP8_INVERSE, _of_modelopt("MIXED_PRECISION")),
}


def rewrite_as(plain: Path, folder: Path, layout: str, chosen: Callable[[str], bool] = lambda _: True) -> Path:
    """A copy of a checkpoint in bfloat16 whose linear matrices are in a layout, those whose modules are `chosen`."""
    config, tensors = stored(shutil.copytree(plain, folder))
    form, made = LAYOUTS[layout], dict[str, Tensor]()
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith(MATRICES) or tensor.dim() != 2 or tensor.shape[1] % 32 or not chosen(module):
            made[name] = tensor
            continue
        parts = form.experts(tensor) if ".experts." in name else form.others(tensor)
        made |= {f"{module}.{last}": value for last, value in parts.items()}
    for file, content in form.files.items():
        (folder / file).write_text(json.dumps(content))
    return rewrite(folder, config | form.config, made)


# Numbers -------------------------------------------------------------------------------------------------------------


def power(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def e4m3(code: int) -> float:
    """What a byte means in FP8 e4m3fn: sign, 4 exponent bits with bias 7, 3 fraction bits, no infinity."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


POWERS, NUMBERS = (torch.tensor([f(code) for code in range(256)], dtype=torch.float64) for f in (power, e4m3))
VALUES = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    return table[codes.view(torch.uint8).long()]


def unpacked(codes: Tensor) -> Tensor:
    raw = codes.view(torch.uint8)
    return VALUES[torch.stack([raw & 15, raw >> 4], -1).flatten(1).long()]


def numbers(parts: Parts, block: tuple[int, int] = (128, 128)) -> Tensor:
    """The weight (R, C) float32 of a module's tensors, every number rounded as its format says."""
    codes = parts.get("weight_packed", parts.get("weight"))
    scale = next(parts[last] for last in ("weight_scale_inv", "weight_scale", "scale") if last in parts)
    values = looked_up(NUMBERS, codes) if codes.dtype == torch.float8_e4m3fn else unpacked(codes)
    if "weight_scale_2" in parts:
        factors = (looked_up(NUMBERS, scale) * parts["weight_scale_2"].double()).float().double()  # a float32 each
        return (values * factors.repeat_interleave(16, 1)).float()
    rows, columns = (1, 32) if scale.shape == (values.shape[0], values.shape[1] // 32) else block
    return (values * spread(looked_up(POWERS, scale), rows, columns, values.shape)).float()


def weights_of(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json, and every parameter of a rewritten checkpoint as a number."""
    config, tensors = stored(folder)
    scaled = ("weight_scale_inv", "weight_scale", "scale", "weight_scale_2", "input_scale", "weight_packed")
    weights = {name: t for name, t in tensors.items() if not name.endswith(tuple(f".{last}" for last in scaled))}
    for module in {name.rpartition(".")[0] for name in tensors if name.endswith(tuple(f".{s}" for s in scaled[:3]))}:
        parts = {last: tensors[f"{module}.{last}"] for last in ("weight", *scaled) if f"{module}.{last}" in tensors}
        weights[f"{module}.weight"] = numbers(parts)
    return config, weights
