"""config.json as transformers needs it, above all the share of each attention head that is rotated."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from quantizers.system.errors import ArchitectureError

from .architecture import Architecture


def rotary_factor(facts: Architecture, config: dict[str, Any], where: str = "config.json") -> float | None:
    """The share of each attention head that is rotated; None if the family or config.json has no key for it.

    Raises:
        ArchitectureError: the key is out of range, or contradicts rope_parameters.
    """
    if facts.rotary_dim_key is None or facts.rotary_dim_key not in config:
        return None
    rotary, head = config[facts.rotary_dim_key], facts.sizes["head_dim"].value
    if not isinstance(rotary, int) or not 0 < rotary <= head or rotary % 2:
        raise ArchitectureError(
            f"{where}: {facts.rotary_dim_key} is {reprlib.repr(rotary)}; an even number up to {head} is needed"
        )
    factor: float = rotary / head
    rope = config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ArchitectureError(f"{where}: rope_parameters is {reprlib.repr(rope)}; an object is needed")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ArchitectureError(f"{where}: rope_theta is {reprlib.repr(theta)}; a positive number is needed")
    stated = rope.get("partial_rotary_factor", factor)
    if stated != factor:
        raise ArchitectureError(
            f"{where}: rope_parameters.partial_rotary_factor is {reprlib.repr(stated)}, but {facts.rotary_dim_key} "
            f"means {factor}; correct one of the two"
        )
    return factor


def transformers_config(facts: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """config.json for transformers, with the rotary factor."""
    factor = rotary_factor(facts, config)
    if factor is None:
        return config
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config["rope_theta"]})
    return config | {"rope_parameters": rope | {"partial_rotary_factor": factor}}
