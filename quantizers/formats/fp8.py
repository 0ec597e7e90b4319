"""The FP8 formats of published models.

    a scale per block   weight F8_E4M3 (R, C), weight_scale_inv (⌈R / b⌉, ⌈C / b⌉)   quant_method fp8
                        weight F8_E4M3 (R, C), weight_scale (⌈R / b⌉, ⌈C / b⌉)       compressed-tensors' `block`
    a scale per row     weight F8_E4M3 (R, C), weight_scale (R, 1)                   compressed-tensors' `channel`

Detected from the tensors; from config.json only for a plan without files. Those of compressed-tensors keep their names.
Scales are F32 or BF16: those in E8M0, and other forms, are refused by name.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.checkpoint.safetensors_header import Stored
from quantizers.system.errors import CheckpointError

ROWS: Final = "rows"
Fp8 = tuple[int, int] | Literal["rows"]  # rows and columns of a block, or ROWS for a scale per row
SCALE = "weight_scale"
SCALE_INV = "weight_scale_inv"  # the name of the scales of blocks where quant_method is fp8
GLOBAL_SCALE, INPUT_SCALE = "weight_global_scale", "input_global_scale"  # of whole matrices in NVFP4, see nvfp4.py
CONVERTED_BLOCK = (128, 128)  # of weights that are made FP8 here


def block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns of an FP8 block, as config.json declares them, or 128x128 if it does not."""
    return declared_block(checkpoint.config, str(checkpoint.folder / CONFIG))


def declared_block(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """As `block_size`, from the content of config.json; `where` is its path, for messages."""
    section = config.get("quantization_config") or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"{where}: quantization_config is {reprlib.repr(section)}; an object is needed")
    key, declared = "weight_block_size", section.get("weight_block_size")
    structures = [weights["block_structure"] for weights in weight_schemes(config) if weights.get("block_structure")]
    if structures:
        key, declared = "config_groups: block_structure", structures[0]
    declared = declared or [128, 128]
    if not isinstance(declared, list) or len(declared) != 2 or not all(type(n) is int and n > 0 for n in declared):
        raise CheckpointError(
            f"{where}: quantization_config.{key} is {reprlib.repr(declared)}; two positive numbers are needed"
        )
    return declared[0], declared[1]


@cache
def scale_shape(form: Fp8, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scale of a weight (R, C)."""
    return blocks_of(shape, form) if isinstance(form, tuple) else (shape[0], 1)


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Rows and columns of blocks in a matrix, partial ones included."""
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def stored_form(tensors: Mapping[str, Stored], block: tuple[int, int]) -> Fp8:
    """The format of a checkpoint with these tensors: ROWS if one is a scale per row, else `block`."""
    scales = ((name, scale.shape) for name, scale in tensors.items() if name.endswith(f".{SCALE}"))
    weights = ((tensors.get(name.removesuffix("_scale")), shape) for name, shape in scales)
    return ROWS if any(weight and is_per_row(weight.shape, shape, block) for weight, shape in weights) else block


def is_per_row(weight: Sequence[int], scale: Sequence[int], block: tuple[int, int]) -> bool:
    """Whether a scale of this shape is one per row of a weight (R, C)."""
    return tuple(scale) == (weight[0], 1) != blocks_of(weight, block)


def unreadable_scale(form: Fp8, scale: Stored, weight: tuple[int, ...]) -> str | None:
    """What a scale of a weight (R, C) is, if it is of another form, one that is known but not read; None otherwise."""
    if scale.dtype in ("F8_E8M0", "U8"):
        return "in E8M0, powers of two in a byte"
    if scale.shape == scale_shape(form, weight):
        return None
    if scale.shape in ((), (1,), (1, 1)):
        return "for the whole matrix"
    if len(scale.shape) == 2 and scale.shape[0] == weight[0] and scale.shape[1] > 1 and not weight[1] % scale.shape[1]:
        return f"for {weight[1] // scale.shape[1]} columns of each row"
    return None


def weight_schemes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `weights` entry of every config group in config.json."""
    section = config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    groups = groups.values() if isinstance(groups, Mapping) else ()
    schemes = (group.get("weights") for group in groups if isinstance(group, Mapping))
    return [weights for weights in schemes if isinstance(weights, Mapping)]


def has_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether config.json declares scales for an FP8 cache of keys and values."""
    section = config.get("quantization_config")
    return isinstance(section, Mapping) and bool(section.get("kv_cache_scheme"))


def declared_form(config: Mapping[str, Any], where: str) -> Fp8:
    """The format that an FP8 model's config.json declares; `where` is its path, for messages.

    Raises:
        CheckpointError: it declares none of these formats.
    """
    block = declared_block(config, where)
    if (config.get("quantization_config") or {}).get("quant_method") != "compressed-tensors":
        return block
    schemes = weight_schemes(config)
    strategies = {str(weights.get("strategy")) for weights in schemes}
    wanted = {"num_bits": 8, "type": "float"}
    if strategies not in ({"channel"}, {"block"}) or not all(wanted.items() <= weights.items() for weights in schemes):
        found = [f"{weights.get('type')}{weights.get('num_bits')} {weights.get('strategy')}" for weights in schemes]
        raise CheckpointError(
            f"{where}: quantization_config.config_groups: weights are {', '.join(dict.fromkeys(found)) or 'not said'}; "
            "of compressed-tensors only FP8 with a scale per row or per block can be quantized (num_bits 8, type "
            "float, strategy channel or block, one in all groups); give the model's FP8 or BF16 release"
        )
    return block if strategies == {"block"} else ROWS


def declared_scale(config: Mapping[str, Any]) -> str:
    """The last name of scales in a checkpoint with this config.json."""
    section = config.get("quantization_config") or {}
    return SCALE if section.get("quant_method") == "compressed-tensors" else SCALE_INV
