"""What a checkpoint of another tool says of how it was made: in its config.json, its card, and llm-compressor's recipe.

These are its maker's words. They are repeated as such, and nothing is concluded from them.
"""

from __future__ import annotations

from typing import Any

import yaml

from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.output_files import RECIPE

from .card_facts import hub_names, source_front_matter

SAID = ("base_model", "license", "license_name", "datasets")  # keys of a card's front matter


def told_by(checkpoint: Checkpoint) -> dict[str, Any]:
    """For report.json; each key only if the checkpoint has it.

    Returns:
        format: quantization method and the version of its library, from config.json.
        modifiers: the steps of llm-compressor that its recipe.yaml names.
        card: of its card's front matter, each key's values.
    """
    config = checkpoint.config.get("quantization_config")
    config = config if isinstance(config, dict) else {}
    kind = {key: str(config[key]) for key in ("quant_method", "version") if config.get(key)}
    front = source_front_matter(checkpoint)
    card = {key: names for key in SAID if (names := hub_names(front.get(key)))}
    told = {"format": kind, "modifiers": _modifiers(checkpoint), "card": card}
    return {key: value for key, value in told.items() if value}


def _modifiers(checkpoint: Checkpoint) -> list[str]:
    """Names of the modifiers in recipe.yaml, in their order: stage, then a group of modifiers, then each of them."""
    try:
        text = (checkpoint.folder / RECIPE).read_text(encoding="utf-8")
        stages = yaml.load(text, Loader=yaml.BaseLoader)  # every value as text: it may hold tags of Python objects
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return []
    groups = [group for stage in _values(stages) for group in _values(stage)]
    names = [str(name) for group in groups if isinstance(group, dict) for name in group]
    return [name for name in names if name.isidentifier() and name.endswith("Modifier")]


def _values(mapping: object) -> list[object]:
    return list(mapping.values()) if isinstance(mapping, dict) else []
