"""The contents of report.json, all put together here; the schema is in eval/report/schema.py.

Before its first layer a run rehearses its end: report, card, page and pictures are made once, into a folder that is
thrown away, of stand-in figures. What a name, a side file or a library breaks is met then.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture, Options, ServerName
from quantizers.architectures.matrices import MATRICES
from quantizers.budget.choice import describe_choice
from quantizers.budget.measure import measuring_seconds, read_measurements
from quantizers.calibration import samples
from quantizers.calibration.render import custom_class
from quantizers.calibration.samples import CalibrationData
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import Checkpoint, left_behind, read_json, side_files
from quantizers.checkpoint.remote import HubFiles
from quantizers.checkpoint.source_identity import source_digest
from quantizers.device.devices import machine, versions
from quantizers.eval.coverage.summary import gate, summarise
from quantizers.eval.coverage.summary import gates as coverage_gates
from quantizers.eval.fidelity.as_served import as_served, as_stored, pairs
from quantizers.eval.fidelity.kv_cache import KINDS, kv_figures
from quantizers.eval.fidelity.metrics import Measured, Text
from quantizers.eval.fidelity.scoring import HeldOut
from quantizers.hooks import hook
from quantizers.layers.context import Context
from quantizers.output import journal
from quantizers.planning.allocation import Allocation
from quantizers.planning.gpus import unsaid
from quantizers.planning.job import Job
from quantizers.planning.plan import Plan, summary
from quantizers.recipe.portable import Resolved, is_hub_id
from quantizers.recipe.read import set_location
from quantizers.stitch.audit.checkpoint import Audit, verify
from quantizers.stitch.audit.layer import LayerAudit
from quantizers.stitch.write.shard import ShardDigest
from quantizers.system.errors import CheckpointError, InputError, QuantizeError
from quantizers.system.output_files import CARD
from quantizers.system.progress import peak_memory, progress

from .consumers import Findings, NotChecked, folder_findings, unchecked_notes
from .report_files import read_front_matter, write_report

# Keys of the journal's entries that are elsewhere in the report, or of no use in it.
JOURNAL_ONLY = ("routed", "peak_memory_bytes", "shard", "digest", "source", "audit", "held_out")
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LICENSE_DETAILS = ("license_name", "license_link")
NOT_COUNTED = "the memory that servers need is not counted by this installation"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # of a model, a data set or a licence on the Hub


def planned_report(job: Job, resolved: Resolved, data: CalibrationData, device: torch.device) -> dict[str, Any]:
    """What is known before the first layer. The source's side files and the set are read now, and not again later.

    The recipe is `resolved` as it is published with the output.
    """
    source, model = job.opened, resolved.recipe.source.model
    found = job.facts.found()
    return {
        "source": identity_of(model, source.revision, source) | about_source(job.facts, model, source),
        "settings": {
            "recipe": resolved.recipe.settings(),
            "hash": resolved.hash,
            "published_hash": resolved.published_hash,
            "file": job.path.name,
            "machine": machine(device),
        },
        "versions": versions(),
        "calibration": _calibration(job, data, resolved),
        "notes": [*filter(None, [job.facts.origin(), left_behind(source)]), as_stored(device), *unchecked_notes()],
        **of_plan(job.plan, job.facts, source, model),
        **({"architecture": found} if found else {}),
    }


def of_plan(plan: Plan, facts: Architecture, source: Checkpoint, model: str) -> dict[str, Any]:
    """What of a report depends on bits and group sizes, which a budget decides last; `model` is the published name."""
    numbers = {key: value for key, value in summary(plan, facts).items() if key != "shards"}
    return {"plan": numbers, "serving": _serving(plan, facts, source, model)}


def run_report(
    planned: dict[str, Any],
    job: Job,
    data: CalibrationData,
    figures: dict[str, Any] | None,
    started: float,
    context: Context,
) -> dict[str, Any]:
    """`RunReport` without the keys of the files: the files in work/output are verified with a last reading.

    Args:
        planned: of `planned_report`.
        figures: fidelity on the held-out texts, of `metrics.figures`; None without any.
        started: `time.monotonic()` when this process began.
    """
    layers = journal.done_layers(context.work, job.facts.num_layers)
    on_hub = context.uploads.settle(context.check) if context.uploads else None
    written, audit = _last_reading(job, layers, context, on_hub)
    engines = folder_findings(context.work / "output", job.facts, on_hub)
    report = planned | _found_report(job, data, figures, layers, verified_parts(written, audit, engines))
    in_layers = sum(sum(entry["seconds"].values()) for entry in layers)
    report["seconds"] = seconds = {"this_process": time.monotonic() - started, "layers": in_layers}
    report["peak_memory_bytes"] = max([peak_memory(context.device), *(entry["peak_memory_bytes"] for entry in layers)])
    if job.allocation:
        entries = read_measurements(context.work, job.facts.moe_layers)
        assert entries is not None
        report["schemes"] = describe_choice(job.allocation, entries)
        seconds["measuring"] = measuring_seconds(context.work, job.facts.num_layers)
    return report


def _found_report(
    job: Job,
    data: CalibrationData,
    figures: dict[str, Any] | None,
    layers: Sequence[dict[str, Any]],
    verified: dict[str, Any],
) -> dict[str, Any]:
    """What a run found out but for its choice within a budget, times and memory; `layers` are the journal's entries."""
    coverage, checks = _coverage(job, data, layers)
    report = verified | (figures or {}) | {"coverage": coverage}
    if figures and job.recipe.verify and (asked := job.recipe.verify.perplexity):
        limits = (
            ("perplexity", figures["perplexity"]["increase"], asked.max_increase, "relative increase of perplexity"),
            ("kl", figures["kl"]["mean"], asked.max_kl, "mean KL(source || output), nats"),
            ("kl p99", figures["kl"]["p99"], asked.max_p99, "99th percentile of KL(source || output), nats"),
        )
        checks += [gate(name, value, limit, words) for name, value, limit, words in limits if limit is not None]
    report["gates"] += checks
    report["layers"] = [{key: value for key, value in entry.items() if key not in JOURNAL_ONLY} for entry in layers]
    return report


def rehearse(
    job: Job,
    planned: Mapping[str, Any],
    data: CalibrationData,
    evaluation: HeldOut | None,
    engines: Findings,
    texts: Mapping[str, str],
) -> dict[str, Any]:
    """Make report, card, page and pictures of stand-in figures; the report.

    Args:
        planned: of `planned_report`; `engines`: of `consumers.plan_findings`; `texts`: see `Resolved.texts`.
        evaluation: None if nothing is measured.

    Raises:
        InputError: something that would end the run after its last layer. A picture that fails is only a note.
    """
    categories = len(samples.category_names(data.samples))
    layers = [_entry(number, job, categories) for number in range(job.facts.num_layers)]
    written = {job.plan.shard_file(part): ShardDigest(bytes=0, sha256="", tensors="") for part in job.plan.parts}
    try:
        figures = evaluation.figures(_measured(job, evaluation.texts), "the output") if evaluation else None
        report = dict(planned) | _found_report(job, data, figures, layers, verified_parts(written, Audit(), engines))
        report |= {"seconds": {"this_process": 0.0, "layers": 0.0}, "peak_memory_bytes": 0}
        if job.allocation:
            measurements = [_measurement(number, job.allocation) for number in job.facts.moe_layers]
            report["schemes"] = describe_choice(job.allocation, measurements)
        with TemporaryDirectory() as folder:
            made = write_report(Path(folder), report, texts)
        for file in side_files(job.opened.folder):  # which are copied at the end
            file.open("rb").close()
        return made
    except QuantizeError:  # which is a line of its own, such as of a full disk
        raise
    except Exception as failure:
        words = " ".join(str(failure).split())[:300]
        raise InputError(
            f"{job.path}: this run would fail after its last layer ({type(failure).__name__}: {words}), so it was not "
            "begun; correct what is named there, or report it"
        ) from failure


def _entry(number: int, job: Job, categories: int) -> dict[str, Any]:
    """The journal's entry of a layer in which every expert got the same."""
    routed = number not in job.facts.dense
    return {
        "layer": number,
        "proof": 0.0,
        "seconds": {},
        "error": {"gate_up_rounding": 0.1, "down_rounding": 0.1} if routed else {},
        "fallbacks": [],
        "leaning": None,
        "closeness": None,
        "routed": [[1] * job.facts.num_experts] * categories if routed else [],
    } | ({"kv_peaks": [1.0, 1.0]} if job.plan.kv_scales(number) else {})


def _measurement(number: int, allocation: Allocation) -> dict[str, Any]:
    """The measurement for a budget of a layer in which every scheme loses the same."""
    losses = dict.fromkeys(map(str, allocation.candidates), 0.1)
    by_matrix = {scheme: dict.fromkeys(MATRICES, 0.1) for scheme in losses}
    by_expert = {scheme: [0.1] for scheme in losses}
    figures = {"loss": losses, "error": losses, "by_matrix": by_matrix, "by_expert": by_expert}
    return {"kl": 0.1, "disturbance": 0.1, **figures, "layer": number, "experts": 1}


def _measured(job: Job, texts: list[Text]) -> Measured:
    """An output as close to its source in every token."""
    loss = np.ones(sum(len(text.tokens) - 1 for text in texts))
    agreement = [None if number in job.facts.dense else 1.0 for number in range(job.facts.num_layers)]
    parts = [{"agreement": share, "hidden_error": 0.1} for share in agreement]
    cards, even = job.recipe.as_served, (loss, loss / 100, loss / 100, loss.astype(bool))
    (on_cards,) = as_served([even] * len(pairs(2, len(cards))), 2, cards, texts)
    for card in cards:
        on_cards[card]["kernels"] = {}
    cache = kv_figures([even] * len(KINDS), even, texts) if job.plan.cached else {}
    return Measured(loss, *even, [part | {"long": part} for part in parts], on_cards, cache)


def _last_reading(
    job: Job, layers: Sequence[dict[str, Any]], context: Context, on_hub: HubFiles | None
) -> tuple[dict[str, ShardDigest], Audit]:
    """Every shard's digest, by file name, and the audit of the whole folder, read once more from the disk.

    Of shards that are `on_hub` alone, its hashes are compared. Raises a QuantizeError if a shard has changed since it
    was written; the same command makes it again.
    """
    folder = context.work / "output"
    entries = [*layers, *journal.passthrough_entries(context.work)]
    written = {entry["shard"]: entry["digest"] for entry in entries}
    audits = [LayerAudit(**entry["audit"]) for entry in entries]
    with progress("last reading", len(written), unit="shard", check=context.check) as step:
        audit = verify(folder, job.opened, context.device, written, step, audits, own=job.facts, remote=on_hub)
    if audit.changed:
        more = f", and {len(audit.changed) - 1} more" if len(audit.changed) > 1 else ""
        raise QuantizeError(
            f"{folder}: {audit.changed[0]}{more}; check the disk, then give the same command again, which makes "
            "what was damaged again"
        )
    return written, audit


def verified_parts(written: Mapping[str, ShardDigest], audit: Audit, engines: Findings | None) -> dict[str, Any]:
    """What holds of every output: its files are as planned, and serving engines read them as meant, unless the folder
    cannot be opened, which the audit reports.
    """
    gates = [gate("audit", len(audit.differences), 0, "differences from what the plan promises")]
    report = {"audit": audit.as_dict() | {"digests": written}, "gates": gates}
    if engines is None:
        return report
    misread = "ways in which vLLM, SGLang or transformers would misread it"
    if not isinstance(engines, NotChecked):
        gates.append(gate("consumers", len(engines.errors), 0, misread))
    return report | {"consumers": engines.as_dict()}


def identity_of(model: str, revision: str | None, checkpoint: Checkpoint) -> dict[str, Any]:
    """Name, revision and digest of a checkpoint."""
    return {"model": model, "revision": revision, "digest": source_digest(checkpoint)}


def _calibration(job: Job, data: CalibrationData, resolved: Resolved) -> dict[str, Any]:
    """The calibration set in numbers; local data files have the names under which they are published."""
    calibration = read_set(set_location(job.recipe.calibration_set, job.path))
    found = data.summary()
    for row in (*found["dropped"], *found["not_rendered"]):
        row |= {key: resolved.published(row[key]) for key in ("source", "first") if key in row}
    used = {sample.source for sample in data.samples}
    datasets = (s.dataset for s in calibration.sources if not s.is_local and s.dataset in used)
    licences = samples.used_licences(calibration, data).items()
    return found | {
        "categories": samples.by_category(data),
        "datasets": list(dict.fromkeys(datasets)),
        "licences": {resolved.published(name): licence for name, licence in licences},
        "languages": samples.language_counts(calibration, data.samples),
        "asked_for": samples.asked_for(calibration, data.samples),
        "by_language": samples.by_language(calibration, data),
    }


def _coverage(
    job: Job, data: CalibrationData, layers: Sequence[dict[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tokens that the router sent to each expert, and the recipe's gates on them."""
    names = samples.category_names(data.samples)
    routed = {entry["layer"]: np.array(entry["routed"], dtype=np.int64) for entry in layers if entry["routed"]}
    counts, rule = list(routed.values()), job.recipe.verify.coverage if job.recipe.verify else None
    coverage = summarise(counts, names, rule.min_routed_tokens if rule else 1, list(routed))
    seen = [tokens for entry in layers if (tokens := entry["error"].get("expert_tokens")) is not None]
    if seen:  # in all-expert calibration, whatever the router chose
        coverage["forced"] = {"min": int(min(seen)), "tokens": sum(len(sample.tokens) for sample in data.samples)}
    return coverage, coverage_gates(coverage, counts, names, rule) if rule else []


def _serving(plan: Plan, facts: Architecture, source: Checkpoint, name: str) -> dict[str, Any]:
    """`Serving` of eval/report/schema.py; some models of a family have options of their own, by the source's `name`."""
    # transformers finds the class, and fuses the experts, by the model type in config.json.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    generation = _json(source, "generation_config.json")
    about = {
        "servers": sorted(facts.servers),
        "sglang": server_options(facts, "sglang", name, source) if "sglang" in facts.servers else None,
        "parsers": server_options(facts, "vllm", name, source) if "vllm" in facts.servers else {},
        "sampling": {key: generation[key] for key in SAMPLING_KEYS if type(generation.get(key)) in (int, float)},
    } | ({} if facts.model_type in CONFIG_MAPPING_NAMES else {"transformers": False})
    fits = hook("fits")
    problem = NOT_COUNTED if fits is None else unsaid(facts)
    if fits is None or problem:
        return about | {"longest": facts.positions or 0, "fits": [], "assumptions": [], "cards_unknown": problem}
    fitting: dict[str, Any] = fits(plan, facts, source)
    return about | fitting


def server_options(facts: Architecture, server: ServerName, model: str, source: Checkpoint) -> Options:
    """The options of a server: of the family, of this model, and for a tokenizer with code of its own."""
    code: Options = {"trust-remote-code": True} if custom_class(_json(source, "tokenizer_config.json")) else {}
    return facts.server_options(server, model) | code


def _json(source: Checkpoint, name: str) -> dict[str, Any]:
    """A side file's table; empty if there is none or it cannot be read."""
    try:
        return read_json(source.folder / name)
    except CheckpointError:
        return {}


def about_source(facts: Architecture, model: str, source: Checkpoint) -> dict[str, Any]:
    """What the model card needs to know of the source called `model`.

    That is `license`, the fields of its own card or those kept with the architecture's facts; `language`, those of its
    card; and `made_from`, the models that its card names as its base if it is no model of the Hub itself.
    """
    front = front_matter_of(source)
    names = [name for name in _texts(front.get("license")) if name.lower() not in ("", "~", "null")]  # YAML's nothing
    fields: dict[str, Any] = {"license": names if len(names) > 1 else names[0]} if names else {}
    fields |= {key: front[key] for key in LICENSE_DETAILS if isinstance(front.get(key), str) and front[key]}
    known = (one.license for one in facts.published if model in one.models)
    base = [] if is_hub_id(model) else hub_names(front.get("base_model"))
    named = {"language": hub_names(front.get("language")), "made_from": base}
    return {"license": fields or next(known, fields)} | {key: names for key, names in named.items() if names}


def hub_names(value: object) -> list[str]:
    """The names in a value of a front matter, without paths of the machine where it was written."""
    return [name for name in _texts(value) if _NAME.fullmatch(name)]


def _texts(value: object) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def front_matter_of(source: Checkpoint) -> dict[str, Any]:
    """As `read_front_matter` reads it from a checkpoint's README.md."""
    try:
        return read_front_matter((source.folder / CARD).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}
