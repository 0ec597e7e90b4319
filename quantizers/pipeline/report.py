"""The contents of report.json, all put together here of what eval/report/schema.py declares."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture
from quantizers.budget.choice import describe_choice
from quantizers.budget.measure import measuring_seconds, read_measurements
from quantizers.calibration import samples
from quantizers.calibration.samples import CalibrationData
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import Checkpoint, left_behind, side_files
from quantizers.checkpoint.source_identity import source_digest
from quantizers.device.devices import machine, versions
from quantizers.eval.coverage.figures import AllExpertPass, Coverage, Gate
from quantizers.eval.coverage.summary import gate, summarise
from quantizers.eval.coverage.summary import gates as coverage_gates
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.fidelity.variants import as_stored
from quantizers.eval.report import schema
from quantizers.hooks import hook
from quantizers.output import journal
from quantizers.output.journal import ShardDigest
from quantizers.planning.job import Job
from quantizers.planning.plan import Plan, summary
from quantizers.recipe.portable import Resolved, is_hub_id
from quantizers.recipe.read import set_location
from quantizers.recipe.schema import CoverageGate
from quantizers.stitch.audit.checkpoint import Audit, verify
from quantizers.stitch.audit.layer import LayerAudit
from quantizers.stitch.write.config_files import remarks_on_config
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.output_files import CARD
from quantizers.system.progress import peak_memory, progress
from quantizers.walk.context import Context

from .consumers import Findings, NotChecked, folder_findings, unchecked_notes
from .layer_entry import ConvertedPart, read_entries
from .report_files import read_front_matter

LICENSE_DETAILS = ("license_name", "license_link")
NOT_COUNTED = "the memory that servers need is not counted by this installation"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a model, a data set or a licence on the Hub


def planned_report(job: Job, resolved: Resolved, data: CalibrationData, device: torch.device) -> schema.PlannedRun:
    """Assemble the part of the report that is known before the first layer.

    The source's side files and the set are read now, and not again later. The recipe is `resolved` as it is published
    with the output.
    """
    planned = planned_conversion(job, resolved, device)
    return schema.PlannedRun(
        **planned.changed(notes=[*planned.notes, as_stored(device)]).given(),
        calibration=_calibration(job, data, resolved),
    )


def planned_conversion(job: Job, resolved: Resolved, device: torch.device) -> schema.PlannedByRecipe:
    """The same without a calibration set, as of a recipe that converts."""
    source, model = job.opened, resolved.recipe.source.model
    measured = job.recipe.experts.convert is None
    unmeasured = [f"not measured as served on {card}: {words} there" for card, words in job.left_out.items()]
    remarks = [job.facts.origin(), *remarks_on_config(source, job.facts, measured=measured), left_behind(source)]
    return schema.PlannedByRecipe(
        source=source_figures(job.facts, model, source, " and ".join(map(str, job.plan.source_experts))),
        plan=plan_figures(job.plan, job.facts),
        versions=versions(),
        notes=[*filter(None, remarks), *unmeasured, *unchecked_notes()],
        architecture=job.facts.found() or None,
        serving=serving(job.plan, job.facts, source, model),
        settings=schema.Settings(
            recipe=resolved.recipe.settings(),
            hash=resolved.hash,
            published_hash=resolved.published_hash,
            file=job.path.name,
            machine=machine(device),
        ),
    )


def refuse_unreadable(source: Checkpoint) -> None:
    """Raise an InputError for a side file that cannot be copied when the layers are done."""
    for file in side_files(source.folder):
        try:
            file.open("rb").close()
        except OSError as failure:
            raise InputError(file, f"cannot be read ({failure.strerror})", "it would be copied at the end") from None


def run_report(
    planned: schema.PlannedRun,
    job: Job,
    data: CalibrationData,
    figures: Fidelity | None,
    started: float,
    context: Context,
) -> schema.RunReport:
    """The report of a run, its files not yet recorded: those in work/output are verified with a last reading.

    Args:
        figures: fidelity on the held-out texts; None without any.
        started: `time.monotonic()` when this process began.
    """
    layers = _read_journal(context.work, job.facts.num_layers)
    verified = _last_reading(job, layers.written, layers.audits, context)
    rule = job.recipe.verify.coverage if job.recipe.verify else None
    coverage, coverage_checks = _coverage(layers, data, rule)
    schemes, measuring = None, None
    if job.allocation:
        measurements = read_measurements(context.work, job.facts.moe_layers)
        assert measurements is not None
        schemes = describe_choice(job.allocation, measurements)
        measuring = measuring_seconds(context.work, job.facts.num_layers)
    report = schema.RunReport(
        **planned.given(),
        audit=verified.audit,
        gates=[*verified.gates, *coverage_checks, *_fidelity_gates(job, figures)],
        consumers=verified.consumers,
        coverage=coverage,
        layers=layers.shown,
        seconds=schema.Seconds(
            this_process=time.monotonic() - started,
            layers=sum(sum(layer.seconds.values()) for layer in layers.shown),
            measuring=measuring,
        ),
        peak_memory_bytes=max(peak_memory(context.device), layers.peak_memory_bytes),
        schemes=schemes,
        files=[],
        sha256={},
        card=schema.NO_CARD,
    )
    return schema.MeasuredRunReport(**report.given(), **figures.given()) if figures else report


def conversion_report(
    planned: schema.PlannedByRecipe,
    job: Job,
    parts: Sequence[ConvertedPart],
    started: float,
    context: Context,
) -> schema.ConversionReport:
    """The report of a conversion, as `run_report`; all values of its parts were compared when they were written."""
    written = dict(entry.file for entry in parts)
    verified = _last_reading(job, written, [LayerAudit(**entry.audit) for entry in parts], context)
    shown = [entry.shown() for entry in parts]
    layers = [layer for layer in shown if layer.layer is not None and layer.layer < job.plan.layers]
    return schema.ConversionReport(
        **planned.given(),
        audit=verified.audit,
        gates=[*verified.gates, gate("conversion", 0, 0, "values that differ from the source's")],
        consumers=verified.consumers,
        conversion=schema.Conversion(
            to=str(job.plan.experts.convert),
            before=list(
                dict.fromkeys(str(a.stored.form) for a in job.plan.actions if a.kind == "convert" and a.stored)
            ),
            matrices=sum(part.matrices for part in shown),
            values=sum(part.values for part in shown),
            equal=True,
        ),
        layers=layers,
        seconds=schema.Seconds(
            this_process=time.monotonic() - started, layers=sum(sum(layer.seconds.values()) for layer in layers)
        ),
        peak_memory_bytes=max(peak_memory(context.device), *(entry.peak_memory_bytes for entry in parts)),
        files=[],
        sha256={},
        card=schema.NO_CARD,
    )


@dataclass(frozen=True)
class _Layers:
    """The journal of a run, read once its layers are done.

    Attributes:
        shown: what the report has of each layer.
        routed: by layer with experts, the tokens routed to each expert, (C, E) int64 by category.
        written: the digests of all shards by file name; `audits`: what was compared when they were written.
    """

    shown: list[schema.Layer]
    routed: dict[int, np.ndarray]
    written: dict[str, ShardDigest]
    audits: list[LayerAudit]
    peak_memory_bytes: int


def _read_journal(work: Path, layers: int) -> _Layers:
    entries, passthrough = read_entries(work, layers), journal.passthrough_entries(work)
    audits = [*(entry.audit for entry in entries), *(entry["audit"] for entry in passthrough)]
    return _Layers(
        shown=[entry.shown() for entry in entries],
        routed={entry.layer: np.array(entry.routed, dtype=np.int64) for entry in entries if entry.routed},
        written=dict([*(entry.file for entry in entries), *map(journal.shard_of, passthrough)]),
        audits=[LayerAudit(**audit) for audit in audits],
        peak_memory_bytes=max(entry.peak_memory_bytes for entry in entries),
    )


def _fidelity_gates(job: Job, figures: Fidelity | None) -> list[Gate]:
    """The recipe's gates on fidelity."""
    asked = job.recipe.verify and job.recipe.verify.perplexity
    if figures is None or not asked:
        return []
    limits = (
        ("perplexity", figures.perplexity.increase, asked.max_increase, "relative increase of perplexity"),
        ("kl", figures.kl.mean, asked.max_kl, "mean KL(source || output), nats"),
        ("kl p99", figures.kl.p99, asked.max_p99, "99th percentile of KL(source || output), nats"),
    )
    return [gate(name, value, limit, words) for name, value, limit, words in limits if limit is not None]


def _last_reading(
    job: Job, written: Mapping[str, ShardDigest], audits: Sequence[LayerAudit], context: Context
) -> Verified:
    """The checks of the whole folder, read once more from the disk.

    Of shards that are on the Hub alone, its hashes are compared. Raises a QuantizeError if a shard has changed since it
    was written; the same command makes it again.
    """
    folder, on_hub = context.work / "output", context.uploads.settle(context.check) if context.uploads else None
    convert = job.recipe.experts.convert
    with progress("last reading", len(written), unit="shard", check=context.check) as step:
        audit = verify(
            folder,
            job.opened,
            context.device,
            written,
            step,
            audits,
            own=job.facts,
            remote=on_hub,
            convert=convert,
        )
    if audit.changed:
        more = f", and {len(audit.changed) - 1} more" if len(audit.changed) > 1 else ""
        raise QuantizeError(
            folder,
            f"{audit.changed[0]}{more}",
            "check the disk, then give the same command again, which makes what was damaged again",
        )
    return verified_parts(written, audit, folder_findings(folder, job.facts, on_hub))


class Verified(NamedTuple):
    """Checks that hold for every output: its files are as planned, and serving engines read them as meant."""

    audit: schema.Audit
    gates: list[Gate]
    consumers: schema.Engines | None


def verified_parts(written: Mapping[str, ShardDigest], audit: Audit, engines: Findings | None) -> Verified:
    """The audit and the engines, which are None if the folder cannot be opened, as the audit reports; and their
    gates.
    """
    gates = [gate("audit", len(audit.differences), 0, "differences from what the plan promises")]
    audited = schema.Audit(**audit.as_dict(), digests=dict(written))
    if engines is None:
        return Verified(audited, gates, None)
    if not isinstance(engines, NotChecked):
        gates.append(gate("consumers", len(engines.errors), 0, engines.counted))
    return Verified(audited, gates, schema.Engines.model_validate(engines.as_dict()))


def source_figures(facts: Architecture, model: str, source: Checkpoint, experts: str | None = None) -> schema.Source:
    """A checkpoint called `model`, what its card says of it, and how it stores the routed experts."""
    card, digest = source_card(facts, model, source), source_digest(source)
    return schema.Source(**card.given(), model=model, revision=source.revision, digest=digest, experts=experts)


def _calibration(job: Job, data: CalibrationData, resolved: Resolved) -> schema.Calibration:
    """The calibration set in numbers; local data files have the names under which they are published."""
    calibration = read_set(set_location(job.recipe.calibration_set, job.path))
    figures = data.summary()
    for row in (*figures["dropped"], *figures["not_rendered"]):
        row |= {key: resolved.published(row[key]) for key in ("source", "first") if key in row}
    used = {sample.source for sample in data.samples}
    datasets = (s.dataset for s in calibration.sources if not s.is_local and s.dataset in used)
    licences = samples.used_licences(calibration, data).items()
    return schema.Calibration.model_validate(
        figures
        | {
            "categories": samples.by_category(data),
            "datasets": list(dict.fromkeys(datasets)),
            "licences": {resolved.published(name): licence for name, licence in licences},
            "languages": samples.language_counts(calibration, data.samples),
            "asked_for": samples.asked_for(calibration, data.samples),
            "by_language": samples.by_language(calibration, data),
        }
    )


def _coverage(layers: _Layers, data: CalibrationData, rule: CoverageGate | None) -> tuple[Coverage, list[Gate]]:
    """The tokens that the router sent to each expert, and the recipe's gates on them."""
    names, counts = samples.category_names(data.samples), list(layers.routed.values())
    coverage = summarise(counts, names, rule.min_routed_tokens if rule else 1, list(layers.routed))
    checks = coverage_gates(coverage, counts, names, rule) if rule else []
    errors = (layer.error for layer in layers.shown)
    seen = [
        error.expert_tokens for error in errors if isinstance(error, schema.GramErrors | schema.LlmcompressorErrors)
    ]
    if seen:  # in all-expert calibration, whatever the router chose
        whole = sum(len(sample.tokens) for sample in data.samples)
        coverage = coverage.changed(forced=AllExpertPass(min=int(min(seen)), tokens=whole))
    return coverage, checks


def plan_figures(plan: Plan, facts: Architecture) -> schema.Plan:
    """The plan in numbers; of what is known first, they depend on bits and group sizes, which a budget decides last."""
    return schema.Plan.model_validate({key: value for key, value in summary(plan, facts).items() if key != "shards"})


def serving(plan: Plan, facts: Architecture, source: Checkpoint, name: str) -> schema.Serving:
    """Serving instructions for the output, which depend on bits and group sizes too.

    Some models of a family have options of their own, by the source's `name` as it is published.
    """
    how_to_serve = hook("how_to_serve")
    if how_to_serve is not None:
        section: schema.Serving = how_to_serve(plan, facts, source, name)
        return section
    return schema.Serving(
        servers=[],
        parsers={},
        sglang=None,
        sampling={},
        longest=facts.positions or 0,
        fits=[],
        assumptions=[],
        cards_unknown=NOT_COUNTED,
    )


def source_card(facts: Architecture, model: str, source: Checkpoint) -> schema.SourceCard:
    """Collect the facts about the source called `model` that the model card needs.

    That is its licence, the fields of its own card or those kept with the architecture's facts; the languages of its
    card; and the models that its card names as its base if it is no model of the Hub itself.
    """
    front = front_matter_of(source)
    names = [name for name in _texts(front.get("license")) if name.lower() not in ("", "~", "null")]  # YAML's nothing
    fields: dict[str, Any] = {"license": names if len(names) > 1 else names[0]} if names else {}
    fields |= {key: front[key] for key in LICENSE_DETAILS if isinstance(front.get(key), str) and front[key]}
    known = (published.license for published in facts.published if model in published.models)
    return schema.SourceCard(
        license=fields or next(known, fields),
        language=hub_names(front.get("language")) or None,
        made_from=None if is_hub_id(model) else hub_names(front.get("base_model")) or None,
    )


def hub_names(value: object) -> list[str]:
    """The names in a value of a front matter, without paths of the machine where it was written."""
    return [name for name in _texts(value) if _NAME.fullmatch(name)]


def _texts(value: object) -> list[str]:
    return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]


def front_matter_of(source: Checkpoint) -> dict[str, Any]:
    """As `read_front_matter` reads it from a checkpoint's README.md."""
    try:
        return read_front_matter((source.folder / CARD).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
