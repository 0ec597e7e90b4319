"""How many tokens the router sent to each expert, by category of text; gates on it.

While calibrating, every expert sees every token by construction, so the forced counts prove only
that the mechanism works. What tells a well-calibrated expert from a guessed one is what the router
sent to it: these are the counts below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantizers.recipe import CoverageGate


def summarise(counts: Sequence[np.ndarray], categories: Sequence[str], minimum: int) -> dict[str, Any]:
    """Routed tokens over all layers.

    Args:
        counts: for each layer (categories, E) int64.
        categories: names of the rows.
        minimum: routed tokens from which an expert counts as covered.

    Returns:
        min, median, uncovered (pairs), pairs, and per layer min, median, uncovered and the worst expert.
    """
    totals = np.stack([layer.sum(0) for layer in counts])  # (layers, E)
    layers = [
        {
            "layer": number,
            "min": int(row.min()),
            "median": float(np.median(row)),
            "uncovered": int((row < minimum).sum()),
            "worst_expert": int(row.argmin()),
            "routed_tokens": row.tolist(),
        }
        for number, row in enumerate(totals)
    ]
    uncovered = [[int(a), int(b)] for a, b in np.argwhere(totals < minimum)]
    by_category = {name: int(sum(layer[i].sum() for layer in counts)) for i, name in enumerate(categories)}
    return {
        "min_routed_tokens": minimum,
        "min": int(totals.min()),
        "median": float(np.median(totals)),
        "pairs": int(totals.size),
        "uncovered": len(uncovered),
        "uncovered_pairs": uncovered,
        "per_layer": layers,
        "routed_by_category": by_category,
    }


def gate(summary: dict[str, Any], rule: CoverageGate) -> dict[str, Any]:
    """The recipe's gate: at most a share of (layer, expert) pairs below the minimum."""
    share = summary["uncovered"] / summary["pairs"]
    return {
        "name": "coverage",
        "passed": share <= rule.max_uncovered,
        "value": share,
        "limit": rule.max_uncovered,
        "meaning": f"share of experts with fewer than {rule.min_routed_tokens} routed tokens",
    }
