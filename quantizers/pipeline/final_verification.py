"""After the loop over the layers: a last reading of all files, and the gates on what was found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quantizers.layers.context import Context
from quantizers.output import journal
from quantizers.planning.job import Job
from quantizers.recipe.schema import PerplexityGate
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import checked, progress
from stitch.audit.checkpoint import Audit, verify
from stitch.audit.layer import LayerAudit
from stitch.write.digests import ShardDigest

if TYPE_CHECKING:
    from eval.serving.findings import Consumers


def last_reading(job: Job, layers: Sequence[dict[str, Any]], context: Context) -> tuple[dict[str, ShardDigest], Audit]:
    """Read every shard once more, from the disk, and put together what was found when they were written.

    Returns:
        The digests of the shards, by file name, and the audit of the whole folder.

    Raises:
        QuantizeError: a shard has changed since it was written; the same command makes it again.
    """
    folder = context.work / "output"
    passthrough = (journal.kept_file(context.work, part) for part in job.plan.kept_parts)
    entries = [*layers, *(json.loads(file.read_text()) for file in passthrough)]
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


def own_gates(audit: Audit, engines: Consumers | None) -> list[dict[str, Any]]:
    """The gates of every output: its files are as planned, and serving engines read them as meant.

    Args:
        engines: None if the folder cannot be opened, which the audit reports.
    """
    found: list[tuple[str, Sequence[object], str]] = [
        ("audit", audit.differences, "differences from what the plan promises")
    ]
    if engines is not None:
        meaning = "ways in which vLLM, SGLang or transformers would misread it"
        found.append(("consumers", engines.errors, meaning))
    return [
        {"name": name, "passed": not faults, "value": len(faults), "limit": 0, "meaning": meaning}
        for name, faults, meaning in found
    ]


def fidelity_gates(result: dict[str, Any], asked: PerplexityGate) -> list[dict[str, Any]]:
    """The recipe's gates on perplexity and KL."""
    limits = (
        ("perplexity", result["perplexity"]["increase"], asked.max_increase, "relative increase of perplexity"),
        ("kl", result["kl"]["mean"], asked.max_kl, "mean KL(source || output), nats"),
    )
    return [
        {"name": name, "passed": value <= limit, "value": value, "limit": limit, "meaning": meaning}
        for name, value, limit, meaning in limits
        if limit is not None
    ]
