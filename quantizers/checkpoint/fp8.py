"""The two forms of FP8 in which models are published.

    a scale per block   weight F8_E4M3 (R, C), weight_scale_inv (⌈R / b⌉, ⌈C / b⌉)   quant_method fp8
    a scale per row     weight F8_E4M3 (R, C), weight_scale (R, 1)                   compressed-tensors' `channel`

The tensors say which it is; config.json is asked only where there are none, for a plan without the files. The second
form is the one that compressed-tensors writes itself, so nothing in it is renamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final, Literal

from quantizers.system.errors import CheckpointError

from .reader import declared_block

ROWS: Final = "rows"
Fp8 = tuple[int, int] | Literal["rows"]  # rows and columns of a block, or ROWS for a scale per row


@cache
def scale_of(form: Fp8, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The last part of the name of a weight's scale as it is published, and its shape for a weight of (R, C)."""
    if isinstance(form, tuple):
        return "weight_scale_inv", tuple(math.ceil(n / b) for n, b in zip(shape, form, strict=True))
    return "weight_scale", (shape[0], 1)


def stored_form(names: Iterable[str], block: tuple[int, int]) -> Fp8:
    """The form of a checkpoint with tensors of these names; `block` where no name shows a scale per row."""
    return ROWS if any(name.endswith(".weight_scale") for name in names) else block


def declared_form(config: Mapping[str, Any], where: str) -> Fp8:
    """The form that config.json declares.

    Args:
        config: config.json of a model that is FP8.
        where: its path, for messages.

    Raises:
        CheckpointError: it declares neither form.
    """
    block = declared_block(config, where)
    section = config.get("quantization_config") or {}
    if section.get("quant_method") != "compressed-tensors":
        return block
    groups = section.get("config_groups")
    schemes = [g.get("weights") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, dict) else []
    wanted = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if not schemes or not all(isinstance(s, Mapping) and wanted.items() <= s.items() for s in schemes):
        raise CheckpointError(
            f"{where}: quantization_config.config_groups: of compressed-tensors only FP8 with a scale per row can be "
            "read (num_bits 8, type float, strategy channel); give the model's FP8 or BF16 release"
        )
    return ROWS
