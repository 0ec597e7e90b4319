"""After the loop over layers: one last reading of the files, and what was found on the way as a report with gates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.consumers.folder import check_folder
from eval.coverage.gates import gates as coverage_gates
from eval.coverage.gates import summarise
from quantizers.budget.choice import describe_choice
from quantizers.budget.measure import read_measurements
from quantizers.calibration.tally import by_category
from quantizers.checkpoint.source_files import source_digest
from quantizers.device.devices import machine, versions
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.plan.summary import summary
from quantizers.recipe.schema import PerplexityGate
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import checked, progress
from stitch.audit.checkpoint import Audit, verify
from stitch.audit.folder import folders_left_out
from stitch.audit.layer import LayerAudit
from stitch.write.digests import ShardDigest

if TYPE_CHECKING:
    from eval.consumers.findings import Consumers
    from quantizers.calibration.data import CalibrationData
    from quantizers.recipe.portable import Resolved

JOURNAL_ONLY = (
    "routed",
    "peak_memory_bytes",
    "shard",
    "digest",
    "source",
    "audit",
    "held_out",
)  # left out of `layers`: elsewhere in the report
NOT_SIMULATED = (
    "vLLM quantizes activations to FP8 for what is kept in FP8, at run time; that is not simulated in these figures."
)


def prove(
    job: Job,
    resolved: Resolved,
    data: CalibrationData,
    layers: list[dict[str, Any]],
    figures: dict[str, Any] | None,
    context: Context,
) -> dict[str, Any]:
    """Compare the files in work/output with the journal, and report all that is known about them.

    Args:
        resolved: the recipe as it is published with the output.
        layers: the journal's entries.
        figures: what the output does with the held-out texts; None without any.
        context: of rank 0.

    Returns:
        The report without times, memory and the list of files.
    """
    folder, recipe, source = context.work / "output", job.recipe, job.opened
    written, audit = last_reading(job, layers, context)
    names = sorted({sample.category for sample in data.samples})
    routed = {entry["layer"]: np.array(entry["routed"], dtype=np.int64) for entry in layers if entry["routed"]}
    counts = list(routed.values())
    rule = recipe.verify.coverage if recipe.verify else None
    coverage = summarise(counts, names, rule.min_routed_tokens if rule else 1, list(routed))
    forced_tokens = [
        entry["error"]["expert_tokens"] for entry in layers if entry["error"].get("expert_tokens") is not None
    ]
    if forced_tokens:  # tokens that every expert saw in the forced pass, independent of routing
        coverage["forced"] = {
            "min": int(min(forced_tokens)),
            "tokens": sum(len(sample.tokens) for sample in data.samples),
        }
    report: dict[str, Any] = {
        "source": {
            "model": resolved.recipe.source.model,
            "revision": recipe.source.revision,
            "digest": source_digest(source),
        },
        "settings": {"recipe": resolved.recipe.settings(), "hash": resolved.hash, "machine": machine(context.device)},
        "versions": versions(),
        "plan": {key: value for key, value in summary(job.plan, job.sizes).items() if key != "shards"},
        "calibration": describe(data, resolved),
        "layers": [{k: v for k, v in entry.items() if k not in JOURNAL_ONLY} for entry in layers],
        "coverage": coverage,
        "audit": audit.as_dict() | {"digests": dict(written)},
        "notes": [NOT_SIMULATED, *folders_left_out(source.folder)],
    }
    if job.allocation:
        entries = read_measurements(context.work, job.sizes.moe_layers)
        assert entries is not None
        report["schemes"] = describe_choice(job.allocation, entries)
    consumers = check_folder(folder, job.own)
    if consumers is not None:
        report["consumers"] = consumers.as_dict()
    gates = own_gates(audit, consumers)
    if rule:
        gates += coverage_gates(coverage, counts, names, rule)
    gate = recipe.verify.perplexity if recipe.verify else None
    if gate and figures:
        report |= figures
        gates += fidelity_gates(figures, gate)
    report["gates"] = gates
    return report


def last_reading(job: Job, layers: Sequence[dict[str, Any]], context: Context) -> tuple[dict[str, ShardDigest], Audit]:
    """Read every shard once more, from the disk, and put together what was found when they were written.

    Returns:
        The digests of the shards, by file name, and the audit of the whole folder.

    Raises:
        QuantizeError: a shard has changed since it was written; the same command makes it again.
    """
    folder = context.work / "output"
    kept = (journal.kept_file(context.work, part) for part in job.plan.kept_parts)
    entries = [*layers, *(json.loads(file.read_text()) for file in kept)]
    written = {entry["shard"]: entry["digest"] for entry in entries}
    with progress("last reading", len(written), unit="shard") as step:
        audit = verify(
            folder,
            job.opened,
            context.device,
            written,
            checked(step, context.check),
            [LayerAudit(**entry["audit"]) for entry in entries],
            own=job.own,
        )
    if audit.changed:
        more = f", and {len(audit.changed) - 1} more" if len(audit.changed) > 1 else ""
        raise QuantizeError(
            f"{folder}: {audit.changed[0]}{more}; check the disk, then give the same command again, which makes "
            "what was damaged again"
        )
    return written, audit


def describe(data: CalibrationData, resolved: Resolved) -> dict[str, Any]:
    """A calibration set in numbers: its own summary, plus a row of `calibration.tally` for each category.

    Args:
        resolved: gives the names under which local data files are published.
    """
    summary = data.summary()
    for dropped in summary["dropped"]:
        dropped |= {key: resolved.published(dropped[key]) for key in ("source", "first")}
    return summary | {"categories": by_category(data)}


def own_gates(audit: Audit, consumers: Consumers | None) -> list[dict[str, Any]]:
    """The gates that every output has, whatever it was asked: its files are as planned, and are read as meant.

    Args:
        consumers: None if the folder cannot be opened, which the audit reports.
    """
    found: list[tuple[str, Sequence[object], str]] = [
        ("audit", audit.differences, "differences from what the plan promises")
    ]
    if consumers is not None:
        meaning = "ways in which vLLM, SGLang or transformers would misread it"
        found.append(("consumers", consumers.errors, meaning))
    return [
        {"name": name, "passed": not faults, "value": len(faults), "limit": 0, "meaning": meaning}
        for name, faults, meaning in found
    ]


def fidelity_gates(result: dict[str, Any], asked: PerplexityGate) -> list[dict[str, Any]]:
    """Whether the recipe's limits on perplexity and KL are kept."""
    limits = (
        ("perplexity", result["perplexity"]["increase"], asked.max_increase, "relative increase of perplexity"),
        ("kl", result["kl"]["mean"], asked.max_kl, "mean KL(source || output), nats"),
    )
    return [
        {"name": name, "passed": value <= limit, "value": value, "limit": limit, "meaning": meaning}
        for name, value, limit, meaning in limits
        if limit is not None
    ]
