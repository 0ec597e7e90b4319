"""Collects what the card says beyond measurements into report.json, so that the card needs no other input."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quantizers.calibration.data import language_counts
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import Checkpoint
from quantizers.plan.cards import parse_cards
from quantizers.plan.job import Job
from quantizers.plan.serving_memory import assumptions, common_fits, serving_model
from quantizers.recipe.schema import set_location
from quantizers.system.own_files import CARD

from .card import read_front_matter

if TYPE_CHECKING:
    from quantizers.calibration.data import CalibrationData

LICENSE_KEYS = ("license", "license_name", "license_link")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def add_card_facts(report: dict[str, Any], job: Job, data: CalibrationData) -> None:
    """Add to a report: the recipe's file name, the licence, datasets and languages, and how to serve the output."""
    calibration = read_set(set_location(job.recipe.calibration, job.path))
    report["settings"]["file"] = job.path.name
    report["source"]["license"] = license_of(job, job.opened)
    report["calibration"]["datasets"] = list(dict.fromkeys(s.dataset for s in calibration.sources if not s.is_local))
    report["calibration"]["languages"] = language_counts(calibration, data.samples)
    report["serving"] = serving(job, job.opened)


def license_of(job: Job, source: Checkpoint) -> dict[str, str]:
    """The licence fields of the source's own card, or those kept with the architecture's facts if it has none."""
    front = source_front_matter(source)
    fields = {key: str(front[key]) for key in LICENSE_KEYS if front.get(key)}
    known = (one.license for one in job.facts.published if job.recipe.source.model in one.models)
    return fields or next(known, fields)


def source_front_matter(source: Checkpoint) -> dict[str, Any]:
    """The YAML at the head of a checkpoint's README.md; empty if there is none or it cannot be read."""
    try:
        return read_front_matter((source.folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def serving(job: Job, source: Checkpoint) -> dict[str, Any]:
    """Parsers, sampling defaults, and how the model fits into the memory of common cards."""
    try:
        generation = json.loads((source.folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        generation = {}
    vllm = job.facts.servers.get("vllm")
    model = serving_model(job.plan, job.facts, job.sizes, job.config, job.fp8)
    fits = common_fits(model)
    return {
        "servers": sorted(job.facts.servers),
        "sglang": job.facts.servers["sglang"].options if "sglang" in job.facts.servers else None,
        "parsers": vllm.options if vllm else {},
        "sampling": {key: generation[key] for key in SAMPLING_KEYS if key in generation},
        "longest": model.longest,
        "fits": [row.as_dict() for row in fits],
        "assumptions": assumptions([parse_cards(row.cards) for row in fits]) if fits else [],
    }
