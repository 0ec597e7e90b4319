"""What checkpoints of other makers say of themselves: in model card, config.json, and llm-compressor's recipe.

These are their makers' words. They are repeated as such, and nothing is concluded from them.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import Checkpoint
from quantizers.recipe.portable import is_hub_id
from quantizers.system.output_files import CARD, RECIPE

from .report_files import read_front_matter

LICENSE_KEYS = ("license", "license_name", "license_link")
SAID = ("base_model", "license", "license_name", "datasets")  # keys of a card's front matter
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a model, a data set or a licence on the Hub


def about_source(facts: Architecture, model: str, source: Checkpoint) -> dict[str, Any]:
    """What the model card needs to know of the source.

    Args:
        model: the source's name, by which it is looked up among the facts' published models.

    Returns:
        license: the licence fields of the source's own card, or those kept with the architecture's facts.
        made_from: the models that its own card names as its base, if it is no model of the Hub itself.
    """
    front = source_front_matter(source)
    fields = {key: str(front[key]) for key in LICENSE_KEYS if front.get(key)}
    known = (one.license for one in facts.published if model in one.models)
    base = [] if is_hub_id(model) else hub_names(front.get("base_model"))
    return {"license": fields or next(known, fields)} | ({"made_from": base} if base else {})


def told_by(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint of another tool says of how it was made; each key only if the checkpoint has it.

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


def hub_names(value: object) -> list[str]:
    """The names in a value of a front matter, without paths of the machine where it was written."""
    values = value if isinstance(value, list) else [value]
    return [name for name in values if isinstance(name, str) and _NAME.fullmatch(name)]


def source_front_matter(source: Checkpoint) -> dict[str, Any]:
    """The YAML at the head of a checkpoint's README.md; empty if there is none or it cannot be read."""
    try:
        return read_front_matter((source.folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


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
