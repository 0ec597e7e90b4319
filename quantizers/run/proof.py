"""After the loop over layers: audit, coverage, perplexity and KL of the assembled files, as one report with gates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.consumers.folder import check_folder
from eval.coverage.gates import gates as coverage_gates
from eval.coverage.gates import summarise
from quantizers.budget.choice import describe_choice
from quantizers.budget.measurements import read_measurements
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.source_files import source_digest
from quantizers.device.devices import machine, versions
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.plan.summary import summary
from quantizers.recipe.schema import PerplexityGate, set_location
from quantizers.system.errors import CheckpointError, OutputError
from quantizers.system.progress import checked, progress
from stitch.audit.checkpoint import verify
from stitch.audit.folder import folders_left_out
from stitch.write.digests import ShardDigest

from .measure import measure

if TYPE_CHECKING:
    from quantizers.calibration.data import CalibrationData
    from quantizers.recipe.portable import Resolved

JOURNAL_ONLY = ("routed", "peak_memory_bytes", "shard", "digest")  # left out of `layers`: elsewhere in the report
NOT_SIMULATED = (
    "vLLM quantizes activations to FP8 in the attention at run time; that is not simulated in these figures."
)


def prove(
    job: Job,
    resolved: Resolved,
    data: CalibrationData,
    layers: list[dict[str, Any]],
    written: Mapping[str, ShardDigest],
    context: Context,
) -> dict[str, Any]:
    """Measure the files in work/output against the source.

    Args:
        resolved: the recipe as it is published with the output.
        layers: the journal's entries.
        written: digests of the shards, taken when they were written.
        context: of rank 0; the other ranks call `fidelity`.

    Returns:
        The report without times, memory and the list of files.
    """
    folder, device = context.work / "output", context.device
    recipe, source = job.recipe, job.opened
    with progress("verifying", job.sizes["layers"]) as step:
        audit = verify(folder, source, device, written, checked(step, context.check))
    _refuse_unreadable(folder, audit.differences)
    names = sorted({sample.category for sample in data.samples})
    counts = [np.array(entry["routed"], dtype=np.int64) for entry in layers]
    rule = recipe.verify.coverage if recipe.verify else None
    coverage = summarise(counts, names, rule.min_routed_tokens if rule else 1)
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
        "settings": {"recipe": resolved.recipe.settings(), "hash": resolved.hash, "machine": machine(device)},
        "versions": versions(),
        "plan": {key: value for key, value in summary(job.plan, job.sizes).items() if key != "shards"},
        "calibration": describe(data, resolved),
        "layers": [{k: v for k, v in entry.items() if k not in JOURNAL_ONLY} for entry in layers],
        "coverage": coverage,
        "audit": audit.as_dict() | {"digests": dict(written)},
        "notes": [NOT_SIMULATED, *folders_left_out(source.folder)],
    }
    if job.allocation:
        entries = read_measurements(context.work, job.sizes["layers"])
        assert entries is not None
        report["schemes"] = describe_choice(job.allocation, entries)
    gates = [
        {
            "name": "audit",
            "passed": not audit.differences,
            "value": len(audit.differences),
            "limit": 0,
            "meaning": "differences from what the plan promises",
        }
    ]
    consumers = check_folder(folder)
    if consumers is not None:
        report["consumers"] = consumers.as_dict()
        gates.append(
            {
                "name": "consumers",
                "passed": not consumers.errors,
                "value": len(consumers.errors),
                "limit": 0,
                "meaning": "ways in which vLLM, SGLang or transformers would misread it",
            }
        )
    if rule:
        gates += coverage_gates(coverage, counts, names, rule)
    gate = recipe.verify.perplexity if recipe.verify else None
    if gate:
        (result,) = fidelity(job, gate, context)
        report |= result
        gates += fidelity_gates(result, gate)
    report["gates"] = gates
    return report


def _refuse_unreadable(folder: Path, differences: list[str]) -> None:
    """Stop the run if the files cannot be opened and so cannot be measured; it resumes once they are restored."""
    try:
        open_folder(folder)
    except CheckpointError:
        raise OutputError(f"{folder}: {differences[0]}; restore the file, or start over with --fresh") from None


def fidelity(job: Job, asked: PerplexityGate, context: Context) -> list[dict[str, Any]]:
    """`measure` the files in work/output, once rank 0 has written them; all ranks call this."""
    context.ranks.barrier()
    return measure(
        job.opened,
        [open_folder(context.work / "output")],
        set_location(asked.data, job.path),
        context.device,
        context.work / "eval",
        context.check,
        trust_remote_code=job.recipe.source.trust_remote_code,
        ranks=context.ranks,
    )


def describe(data: CalibrationData, resolved: Resolved) -> dict[str, Any]:
    """A calibration set in numbers: its own summary, plus samples, tokens and truncated samples by category.

    Args:
        resolved: gives the names under which local data files are published.
    """
    categories: dict[str, dict[str, int]] = {}
    for sample in data.samples:
        row = categories.setdefault(sample.category, {"samples": 0, "tokens": 0, "truncated": 0})
        row["samples"] += 1
        row["tokens"] += len(sample.tokens)
        row["truncated"] += int(sample.truncated > 0)
    summary = data.summary()
    for dropped in summary["dropped"]:
        dropped |= {key: resolved.published(dropped[key]) for key in ("source", "first")}
    return summary | {"categories": dict(sorted(categories.items()))}


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
