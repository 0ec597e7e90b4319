"""The journal's entry of a finished layer: what it keeps of the solution and of the shard, and what is shown of it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

from quantizers.recipe.schema import Stop
from quantizers.solve.result import LayerResult
from quantizers.stitch.audit.layer import LayerAudit
from quantizers.stitch.write.shard import ShardDigest
from quantizers.system.errors import Stopped

Written = tuple[ShardDigest, LayerAudit]
Entry = dict[str, Any]


def of_solution(solved: LayerResult | None) -> Entry:
    """Journal fields on the solution of a layer; `solved` is None if it has no experts."""
    if solved is None:
        return {"error": {}, "fallbacks": [], "leaning": None}
    return {
        # JSON has no infinity. An infinite error means that an expert's weights or inputs overflow.
        "error": {key: value if math.isfinite(value) else None for key, value in solved.error.items()},
        "fallbacks": _by_expert(solved.fallbacks),
        "leaning": solved.under_routed,
    }


def _by_expert(lines: Sequence[str]) -> list[str]:
    """Sort lines by expert number, so that the report does not depend on how many experts were solved at a time."""
    numbers = {line: re.match(r"expert (\d+)", line) for line in lines}
    return sorted(lines, key=lambda line: int(match[1]) if (match := numbers[line]) else -1)


def of_shard(written: Written) -> Entry:
    """Journal fields on a shard that is on disk; `closeness` is that of the experts' matrices to the source's."""
    digest, audit = written
    known = {expert: error for expert, error in enumerate(audit.by_expert) if error is not None}
    closeness = None
    if known:
        worst = max(known, key=known.__getitem__)
        closeness = {"median": statistics.median(known.values()), "worst": known[worst], "worst_expert": worst}
    return {"digest": digest, "audit": audit.as_dict(), "closeness": closeness}


def layer_note(entry: Entry) -> str:
    """Format the note that is shown when a layer is done."""
    parts = [f"{sum(entry['seconds'].values()):.1f} s"]
    if entry["routed"]:
        parts.append(f"rounding {entry['error'].get('down_rounding') or 0.0:.4f}")
    if entry["closeness"]:
        parts.append(f"experts within {entry['closeness']['worst']:.1%}")
    if figures := entry["held_out"]:
        parts.append(f"hidden error {figures['hidden_error']:.4f}")
        if figures["agreement"] is not None:
            parts.append(f"router agreement {figures['agreement']:.2%}")
    return ", ".join(parts)


def refuse_layer(entry: Entry, stop: Stop | None) -> None:
    """Stop after a layer whose figures are beyond what the recipe allows."""
    figures = entry["held_out"]
    if stop is None or not figures:
        return
    error, agreement = figures["hidden_error"], figures["agreement"]
    if stop.max_hidden_error is not None and not error <= stop.max_hidden_error:
        problem = f"hidden error {error:.4g} > {stop.max_hidden_error:g} (verify.stop.max_hidden_error)"
    elif stop.min_router_agreement is not None and agreement is not None and not agreement >= stop.min_router_agreement:
        problem = f"router agreement {agreement:.4g} < {stop.min_router_agreement:g} (verify.stop.min_router_agreement)"
    else:
        return
    raise Stopped(
        "", f"stopped after layer {entry['layer']}: {problem}", "give the same command with --ignore-stop to continue"
    )
