"""Coverage of one set as tables and JSON: the worst experts, and what would help them.

Legend: L layers, C categories, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quantizers.recipe.schema import CoverageGate
from quantizers.system.formatting import gate_figures, text_table

from .gates import gates, named, summarise
from .routing import Routed

WORST = 15  # rows of a table: experts with the fewest tokens, or whose tokens change most
HELPFUL = 3  # categories named for each of them


def report(routed: Routed, rule: CoverageGate) -> dict[str, Any]:
    """Everything that `quantize coverage` reports about one model and one set, gates included."""
    summary = summarise(list(routed.counts), routed.categories, rule.min_routed_tokens, routed.layers)
    return summary | {
        "tokens": dict(zip(routed.categories, routed.tokens.tolist(), strict=True)),
        "tied_choices": int(routed.close.sum()),
        "worst": worst(routed),
        "counts": dict(zip(routed.categories, routed.counts.swapaxes(0, 1).tolist(), strict=True)),
        "gates": gates(summary, list(routed.counts), routed.categories, rule),
    }


def worst(routed: Routed) -> list[dict[str, Any]]:
    """The experts with the fewest tokens, and the categories that send, or nearly send, the most tokens to them."""
    totals = routed.counts.sum(1)  # (L, E)
    even = totals.sum(1) / totals.shape[1]  # (L,), tokens per expert under an even load
    rows = []
    for pair in np.argsort(totals, axis=None, kind="stable")[:WORST]:
        layer, expert = (int(i) for i in np.unravel_index(pair, totals.shape))
        sent_by = _rates(routed, routed.counts[layer, :, expert])
        nearly_sent_by = _rates(routed, routed.near[layer, :, expert])
        rows.append(
            {
                "layer": routed.layers[layer],
                "expert": expert,
                "tokens": int(totals[layer, expert]),
                "share_of_even": float(totals[layer, expert] / even[layer]) if even[layer] else 0.0,
                "sent_by": sent_by,
                "nearly_sent_by": nearly_sent_by,
            }
        )
    return rows


def _rates(routed: Routed, counts: np.ndarray) -> dict[str, float]:
    """The HELPFUL categories with the highest rates, in tokens per thousand of the category; counts is (C,)."""
    rates = 1000 * counts / np.maximum(routed.tokens, 1)
    order = np.argsort(-rates, kind="stable")[:HELPFUL]
    return {routed.categories[i]: float(rates[i]) for i in order if rates[i] > 0}


def coverage_table(found: dict[str, Any]) -> str:
    """What `quantize coverage` prints."""
    rows = [
        (row["layer"], row["expert"], f"{row['tokens']:,}", f"{row['share_of_even']:.1%}", _help(row))
        for row in found["worst"]
    ]
    tokens = sum(found["tokens"].values())
    lines = [
        f"{tokens:,} tokens in {len(found['tokens'])} categories; routed tokens per expert: min {found['min']:,}, "
        f"median {found['median']:,.0f}; {found['uncovered']:,} of {found['pairs']:,} below "
        f"{found['min_routed_tokens']:,}; load entropy at least {found['min_entropy']:.3f}",
        "",
        text_table(("layer", "expert", "tokens", "of even", "what would help (of 1,000 tokens of the category)"), rows),
        "",
    ]
    if drawn := found.get("drawn"):
        lines += [drawn_line(drawn), ""]
    if found["uncovered"]:
        lines += [f"uncovered: {named(found['uncovered_pairs'])}", ""]
    if found["tied_choices"]:
        lines += [f"{found['tied_choices']:,} choices hang on a margin below 1e-6", ""]
    return "\n".join([*lines, gate_table(found["gates"])])


def drawn_line(drawn: dict[str, Any]) -> str:
    """How many tokens the recipe had drawn from its set."""
    if drawn["asked"] >= drawn["tokens"]:
        return (
            f"the recipe asks for {drawn['asked']:,} tokens of the set, which holds {drawn['tokens']:,}: all are used"
        )
    return f"drawn evenly over the categories: {drawn['asked']:,} of the set's {drawn['tokens']:,} tokens"


def _help(row: dict[str, Any]) -> str:
    if row["sent_by"]:
        return ", ".join(f"{name} {rate:.1f}" for name, rate in row["sent_by"].items())
    if row["nearly_sent_by"]:
        return ", ".join(f"{name} nearly ({rate:.1f})" for name, rate in row["nearly_sent_by"].items())
    return "no category of this set comes near it"


def gate_table(found: list[dict[str, Any]]) -> str:
    """Gates with their values and limits, in the format of `quantize run`."""
    rows = [
        (
            gate["name"],
            *gate_figures(gate),
            "passed" if gate["passed"] else "FAILED",
            gate["meaning"],
        )
        for gate in found
    ]
    return text_table(("gate", "value", "limit", "", "what it is"), rows)
