"""The contents of a stitch's report.json, and what the experts' checkpoint says of how it was made."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from quantizers.checkpoint.reader import Checkpoint, left_behind
from quantizers.checkpoint.source_identity import source_digest
from quantizers.device.devices import versions
from quantizers.eval.report import schema
from quantizers.output.journal import ShardDigest
from quantizers.pipeline.consumers import folder_findings, unchecked_notes
from quantizers.pipeline.report import front_matter_of, hub_names, plan_figures, serving, source_figures, verified_parts
from quantizers.stitch.audit.checkpoint import Audit
from quantizers.stitch.write.config_files import remarks_on_config
from quantizers.system.output_files import RECIPE

from .mix import Mix
from .mix import describe as describe_mix

CARD_SAYS = ("base_model", "license", "license_name", "datasets")  # keys of a card's front matter


def stitch_report(
    mix: Mix, settings: dict[str, Any], folder: Path, audit: Audit, written: dict[str, ShardDigest]
) -> schema.StitchReport:
    """The report of a stitched checkpoint, its files not yet recorded.

    By its `settings` a later call recognizes the output; the digests of its shards are of when they were `written`.
    """
    source = mix.source
    model = settings["source"]
    examined = describe_mix(mix.layers)
    remarks = [*remarks_on_config(source, mix.facts), left_behind(source)]
    verified = verified_parts(written, audit, folder_findings(folder, mix.facts))
    return schema.StitchReport(
        source=source_figures(mix.facts, model, source),
        plan=plan_figures(mix.plan, mix.facts),
        versions=versions(),
        notes=[*examined, *filter(None, remarks), *unchecked_notes()],
        serving=serving(mix.plan, mix.facts, source, model),
        audit=verified.audit,
        gates=verified.gates,
        consumers=verified.consumers,
        files=[],
        sha256={},
        card=schema.NO_CARD,
        stitched=schema.Stitched.model_validate(settings),
        experts=_packed_experts(mix, settings["experts"]),
        examined=examined,
        layers=[schema.StitchedLayer(**asdict(layer)) for layer in mix.layers],
    )


def _packed_experts(mix: Mix, model: str) -> schema.PackedExperts:
    """The checkpoint called `model` that the experts come from, and what it says of how it was made.

    That is the `format`, method and version of the library, from config.json; the modifiers of llm-compressor in its
    recipe.yaml; and of its card's front matter the values of CARD_SAYS.
    """
    experts = mix.experts
    config, front = experts.config.get("quantization_config"), front_matter_of(experts)
    kind = {
        key: str(config[key]) for key in ("quant_method", "version") if isinstance(config, dict) and config.get(key)
    }
    return schema.PackedExperts(
        model=model,
        revision=experts.revision,
        digest=source_digest(experts),
        schemes=[scheme.as_dict for scheme in dict.fromkeys(mix.plan.schemes)],
        format=kind or None,
        modifiers=_modifiers(experts) or None,
        card={key: names for key in CARD_SAYS if (names := hub_names(front.get(key)))} or None,
    )


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
