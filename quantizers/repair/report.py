"""The contents of a stitch's report.json, and what the experts' checkpoint says of how it was made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from quantizers.checkpoint.reader import Checkpoint, left_behind
from quantizers.device.devices import versions
from quantizers.pipeline.consumers import folder_findings, unchecked_notes
from quantizers.pipeline.report import about_source, front_matter_of, hub_names, identity_of, of_plan, verified_parts
from quantizers.stitch.audit.checkpoint import Audit
from quantizers.stitch.write.shard import ShardDigest
from quantizers.system.output_files import RECIPE

from .mix import Mix
from .mix import describe as describe_mix

SAID = ("base_model", "license", "license_name", "datasets")  # keys of a card's front matter


def stitch_report(
    mix: Mix, settings: dict[str, Any], folder: Path, audit: Audit, written: dict[str, ShardDigest]
) -> dict[str, Any]:
    """`StitchReport`, without the keys of the files, of a stitched checkpoint.

    By its `settings` a later call recognizes the output; the digests of its shards are of when they were `written`.
    """
    source, model, theirs, examined = mix.source, settings["source"], mix.experts, describe_mix(mix.found)
    schemes = [scheme.as_dict for scheme in dict.fromkeys(mix.plan.schemes)]
    return {
        "stitched": settings,
        "source": identity_of(model, source.revision, source) | about_source(mix.facts, model, source),
        "experts": identity_of(settings["experts"], theirs.revision, theirs) | {"schemes": schemes} | _told_by(theirs),
        "versions": versions(),
        "examined": examined,
        "notes": [*examined, *filter(None, [left_behind(source)]), *unchecked_notes()],
        "layers": [asdict(layer) for layer in mix.found],
        **of_plan(mix.plan, mix.facts, source, model),
        **verified_parts(written, audit, folder_findings(folder, mix.facts)),
    }


def _told_by(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint of another tool says of how it was made, as far as it says it.

    That is its `format`, method and version of the library, from config.json; the `modifiers` of llm-compressor in its
    recipe.yaml; and of its card's front matter the values of SAID.
    """
    config, front = checkpoint.config.get("quantization_config"), front_matter_of(checkpoint)
    kind = {
        key: str(config[key]) for key in ("quant_method", "version") if isinstance(config, dict) and config.get(key)
    }
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
