"""Collects what the card says beyond measurements into report.json, so that the card needs no other input."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import Options, ServerName
from quantizers.architectures.sizes import Sizes
from quantizers.calibration.render import own_class
from quantizers.calibration.samples import by_language, language_counts
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import Checkpoint, block_size
from quantizers.plan.gpus import parse_gpus
from quantizers.plan.job import Job
from quantizers.plan.plan import Plan
from quantizers.plan.serving_memory import assumptions, common_fits, notes, serving_model
from quantizers.plan.tensor_parallel import unsaid
from quantizers.recipe.portable import is_hub_id
from quantizers.recipe.read import set_location
from quantizers.system.output_files import CARD

from .card import read_front_matter

if TYPE_CHECKING:
    from quantizers.calibration.samples import CalibrationData

LICENSE_KEYS = ("license", "license_name", "license_link")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a model, a data set or a licence on the Hub
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_card_facts(report: dict[str, Any], job: Job, data: CalibrationData) -> None:
    """Add to a report: the recipe's file name, the licence, datasets and languages, and how to serve the output."""
    calibration = read_set(set_location(job.recipe.calibration_set, job.path))
    report["settings"]["file"] = job.path.name
    report["source"] |= about_source(job.facts, report["source"]["model"], job.opened)
    used = {sample.source for sample in data.samples}
    datasets = [s.dataset for s in calibration.sources if not s.is_local and s.dataset in used]
    report["calibration"]["datasets"] = list(dict.fromkeys(datasets))
    report["calibration"]["languages"] = language_counts(calibration, data.samples)
    report["calibration"]["by_language"] = by_language(calibration, data)
    report["serving"] = serving(job.plan, job.facts, job.sizes, job.opened, report["source"]["model"])


def about_source(facts: Architecture, model: str, source: Checkpoint) -> dict[str, Any]:
    """What the card needs to know of the source.

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


def serving(plan: Plan, facts: Architecture, sizes: Sizes, source: Checkpoint, name: str) -> dict[str, Any]:
    """The servers' options, sampling defaults, and how the model fits into the memory of common cards.

    Args:
        name: of the source, for options that only some models of the family have.

    Returns:
        servers: those that know the family.
        parsers, sglang: options of vLLM and of SGLang, `true` for one without a value; sglang is null without SGLang.
        transformers: false if it does not know the model type; its class alone would not read the experts' tensors.
        sampling, longest, fits, assumptions: defaults of the source's generation, the model's context in tokens, and
            see `common_fits`.
        cards_unknown: why there are no fits, where the facts do not say what cards hold.
    """
    try:
        generation = json.loads((source.folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        generation = {}
    about = {
        "servers": sorted(facts.servers),
        "sglang": server_options(facts, "sglang", name, source) if "sglang" in facts.servers else None,
        "parsers": server_options(facts, "vllm", name, source) if "vllm" in facts.servers else {},
        "sampling": {key: generation[key] for key in SAMPLING_KEYS if key in generation},
    } | ({} if _in_transformers(facts) else {"transformers": False})
    if problem := unsaid(facts):
        return about | {
            "longest": source.config.get("max_position_embeddings") or 0,
            "fits": [],
            "assumptions": [],
            "cards_unknown": problem,
        }
    model = serving_model(plan, facts, sizes, source.config, plan.fp8_form(block_size(source)))
    fits = common_fits(model)
    return about | {
        "longest": model.longest,
        "fits": [row.as_dict() for row in fits],
        "assumptions": [*assumptions([parse_gpus(row.cards) for row in fits]), *notes(model, fits)] if fits else [],
    }


def server_options(facts: Architecture, server: ServerName, model: str, source: Checkpoint) -> Options:
    """What a server is started with: options of the family, of this model, and for a tokenizer with code of its own."""
    published = (one.options.get(server, {}) for one in facts.published if model in one.models)
    try:
        settings = json.loads((source.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}
    code: Options = {"trust-remote-code": True} if isinstance(settings, dict) and own_class(settings) else {}
    return facts.servers[server].options | next(published, {}) | code


def _in_transformers(facts: Architecture) -> bool:
    """Whether transformers knows the model type in config.json, by which it finds the class and fuses the experts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return facts.model_type in CONFIG_MAPPING_NAMES
