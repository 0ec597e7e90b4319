"""The two FP8 formats of published models.

    a scale per block   weight F8_E4M3 (R, C), weight_scale_inv (⌈R / b⌉, ⌈C / b⌉)   quant_method fp8
    a scale per row     weight F8_E4M3 (R, C), weight_scale (R, 1)                   compressed-tensors' `channel`

Detected from the tensors; from config.json only for a plan without files. The second is compressed-tensors' own, so
its tensors keep their names.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal

from quantizers.checkpoint.reader import CONFIG, Checkpoint
from quantizers.system.errors import CheckpointError

ROWS: Final = "rows"
Fp8 = tuple[int, int] | Literal["rows"]  # rows and columns of a block, or ROWS for a scale per row
SCALE = "weight_scale"
SCALE_INV = "weight_scale_inv"  # the published name of the scales of blocks


def block_size(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows and columns of an FP8 block: weight_block_size in config.json, or 128x128 if that is missing."""
    return declared_block(checkpoint.config, str(checkpoint.folder / CONFIG))


def declared_block(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    """As `block_size`, from the content of config.json; `where` is its path, for messages."""
    section = config.get("quantization_config") or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"{where}: quantization_config is {reprlib.repr(section)}; an object is needed")
    declared = section.get("weight_block_size") or [128, 128]
    if not isinstance(declared, list) or len(declared) != 2 or not all(type(n) is int and n > 0 for n in declared):
        raise CheckpointError(
            f"{where}: quantization_config.weight_block_size is {reprlib.repr(declared)}; "
            "two positive numbers are needed"
        )
    return declared[0], declared[1]


@cache
def scale_of(form: Fp8, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The published name (its last part) and the shape of the scale of a weight (R, C)."""
    if isinstance(form, tuple):
        return SCALE_INV, blocks_of(shape, form)
    return SCALE, (shape[0], 1)


def blocks_of(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Rows and columns of blocks in a matrix, partial ones included."""
    return tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))


def stored_form(names: Iterable[str], block: tuple[int, int]) -> Fp8:
    """The format of a checkpoint with these tensor names: ROWS if one is a scale per row, else `block`."""
    return ROWS if any(name.endswith(f".{SCALE}") for name in names) else block


def weight_schemes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The `weights` entry of every config group in config.json."""
    section = config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, Mapping) else None
    groups = groups.values() if isinstance(groups, Mapping) else ()
    schemes = (group.get("weights") for group in groups if isinstance(group, Mapping))
    return [weights for weights in schemes if isinstance(weights, Mapping)]


def declared_form(config: Mapping[str, Any], where: str) -> Fp8:
    """The format that an FP8 model's config.json declares; `where` is its path, for messages.

    Raises:
        CheckpointError: it declares neither format.
    """
    block = declared_block(config, where)
    if (config.get("quantization_config") or {}).get("quant_method") != "compressed-tensors":
        return block
    schemes = weight_schemes(config)
    wanted = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if not schemes or not all(wanted.items() <= weights.items() for weights in schemes):
        raise CheckpointError(
            f"{where}: quantization_config.config_groups: of compressed-tensors only FP8 with a scale per row is "
            "supported (num_bits 8, type float, strategy channel); give the model's FP8 or BF16 release"
        )
    return ROWS
