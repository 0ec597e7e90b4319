"""Coverage of one set: routed tokens of every expert by category of text, gates on them, and their tables.

In the all-expert pass every expert sees every token, so its counts only prove that the pass works. Whether an expert is
well calibrated depends on how many tokens the router itself sends to it: those are counted here.

Legend: L layers, C categories, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError
from quantizers.system.formatting import gate_figures, text_table

if TYPE_CHECKING:
    from .routing import Routed

NAMED = 20  # uncovered pairs (layer, expert) that a message lists at most
WORST = 15  # rows of a table: experts with the fewest tokens, or whose tokens change most
HELPFUL = 3  # categories named for each of them


def summarise(
    counts: Sequence[np.ndarray], categories: Sequence[str], minimum: int, numbers: Sequence[int]
) -> dict[str, Any]:
    """Routed tokens over all layers, and layer by layer; see `Coverage` in eval/report/schema.py.

    Args:
        counts: for each layer with experts (C, E) int64.
        minimum: routed tokens that an expert needs to count as covered.
        numbers: of these layers.
    """
    totals = np.stack([layer.sum(0) for layer in counts])  # (L, E)
    layers: list[dict[str, Any]] = [
        {
            "layer": number,
            "min": int(row.min()),
            "median": float(np.median(row)),
            "uncovered": int((row < minimum).sum()),
            "worst_expert": int(row.argmin()),
            "entropy": entropy(row),
            "routed_tokens": row.tolist(),
        }
        for number, row in zip(numbers, totals, strict=True)
    ]
    uncovered = [[numbers[int(a)], int(b)] for a, b in np.argwhere(totals < minimum)]
    return {
        "min_routed_tokens": minimum,
        "min": int(totals.min()),
        "median": float(np.median(totals)),
        "pairs": int(totals.size),
        "uncovered": len(uncovered),
        "uncovered_pairs": uncovered,
        "min_entropy": min(layer["entropy"] for layer in layers),
        "per_layer": layers,
        "routed_by_category": {name: int(sum(one[i].sum() for one in counts)) for i, name in enumerate(categories)},
    }


def entropy(load: np.ndarray) -> float:
    """Entropy of a load (E,) relative to an even load: 1 if all experts get the same, 0 if one gets everything."""
    share = load[load > 0] / max(load.sum(), 1)
    return float(-(share * np.log(share)).sum() / math.log(len(load))) + 0.0 if len(load) > 1 else 1.0


def members(floor: str, categories: Sequence[str]) -> list[int]:
    """Rows of the categories that a floor covers: the one of that name, and those below it (`code` for `code/rust`)."""
    return [i for i, name in enumerate(categories) if name == floor or name.startswith(f"{floor}/")]


def check_floors(rule: CoverageGate, categories: Iterable[str], where: str) -> None:
    """Raises InputError, before any slow work starts, for a floor whose category the calibration set does not have."""
    known = sorted(set(categories))
    for floor in rule.categories:
        if not members(floor, known):
            raise InputError(
                f"{where}: verify.coverage.categories.{floor}: the calibration set has no such category; it has "
                f"{', '.join(known)}"
            )


def gates(
    summary: dict[str, Any], counts: Sequence[np.ndarray], categories: Sequence[str], rule: CoverageGate
) -> list[dict[str, Any]]:
    """Check the recipe's gates: the share of pairs below the minimum and below each category's floor, and the entropy.

    Args:
        summary: what `summarise` made of the same counts.
        counts: for each layer (C, E) int64.
    """
    most, words = rule.max_uncovered, "share of experts with fewer than {} routed tokens"
    checks = [("coverage", summary["uncovered"] / summary["pairs"], words.format(rule.min_routed_tokens))]
    for floor, minimum in rule.categories.items():
        rows = members(floor, categories)
        below = float(np.mean([layer[rows].sum(0) < minimum for layer in counts]))
        checks.append((f"coverage {floor}", below, f"{words.format(minimum)} of {floor}"))
    results: list[dict[str, Any]] = [
        {"name": name, "passed": share <= most, "value": share, "limit": most, "meaning": meaning}
        for name, share, meaning in checks
    ]
    if rule.min_entropy is not None:
        least, limit = summary["min_entropy"], rule.min_entropy
        meaning = "entropy of the load in the most uneven layer; 1 is even"
        gate = {"name": "entropy", "passed": least >= limit, "value": least, "limit": limit, "meaning": meaning}
        results.append(gate | {"at_least": True})
    return results


def named(pairs: Sequence[Sequence[int]]) -> str:
    """Pairs as text: `layer 1 expert 3, layer 2 expert 0`, and how many are left out."""
    text = ", ".join(f"layer {layer} expert {expert}" for layer, expert in pairs[:NAMED])
    return text + (f" and {len(pairs) - NAMED:,} more" if len(pairs) > NAMED else "")


def report(routed: Routed, rule: CoverageGate) -> dict[str, Any]:
    """Everything that `quantize coverage` reports about one model and one set, gates included."""
    counts, categories = list(routed.counts), routed.categories
    summary = summarise(counts, categories, rule.min_routed_tokens, routed.layers)
    return summary | {
        "tokens": dict(zip(categories, routed.tokens.tolist(), strict=True)),
        "tied_choices": int(routed.close.sum()),
        "worst": worst(routed),
        "counts": dict(zip(categories, routed.counts.swapaxes(0, 1).tolist(), strict=True)),
        "gates": gates(summary, counts, categories, rule),
    }


def worst(routed: Routed) -> list[dict[str, Any]]:
    """The experts with the fewest tokens, and the categories that send, or nearly send, the most tokens to them."""
    totals = routed.counts.sum(1)  # (L, E)
    even = totals.sum(1) / totals.shape[1]  # (L,), tokens per expert under an even load

    def rates(counts: np.ndarray) -> dict[str, float]:
        """The HELPFUL categories with the highest rates, in tokens per thousand of the category; counts is (C,)."""
        rates = 1000 * counts / np.maximum(routed.tokens, 1)
        order = np.argsort(-rates, kind="stable")[:HELPFUL]
        return {routed.categories[i]: float(rates[i]) for i in order if rates[i] > 0}

    pairs = np.argsort(totals, axis=None, kind="stable")[:WORST]
    return [
        {
            "layer": routed.layers[layer],
            "expert": expert,
            "tokens": int(totals[layer, expert]),
            "share_of_even": float(totals[layer, expert] / even[layer]) if even[layer] else 0.0,
            "sent_by": rates(routed.counts[layer, :, expert]),
            "nearly_sent_by": rates(routed.near[layer, :, expert]),
        }
        for layer, expert in (divmod(int(pair), totals.shape[1]) for pair in pairs)
    ]


def coverage_table(found: dict[str, Any]) -> str:
    """What `quantize coverage` prints."""
    rows = [
        (row["layer"], row["expert"], f"{row['tokens']:,}", f"{row['share_of_even']:.1%}", _help(row))
        for row in found["worst"]
    ]
    parts = [
        f"{sum(found['tokens'].values()):,} tokens in {len(found['tokens'])} categories; routed tokens per expert: min "
        f"{found['min']:,}, median {found['median']:,.0f}; {found['uncovered']:,} of {found['pairs']:,} below "
        f"{found['min_routed_tokens']:,}; load entropy at least {found['min_entropy']:.3f}",
        text_table(("layer", "expert", "tokens", "of even", "what would help (of 1,000 tokens of the category)"), rows),
    ]
    if drawn := found.get("drawn"):
        asked, whole = drawn["asked"], drawn["tokens"]
        parts.append(
            f"the recipe asks for {asked:,} tokens of the set, which holds {whole:,}: all are used"
            if asked >= whole
            else f"drawn evenly over the categories: {asked:,} of the set's {whole:,} tokens"
        )
    if found["uncovered"]:
        parts.append(f"uncovered: {named(found['uncovered_pairs'])}")
    if found["tied_choices"]:
        parts.append(f"{found['tied_choices']:,} choices hang on a margin below 1e-6")
    return "\n\n".join([*parts, gate_table(found["gates"])])


def _help(row: dict[str, Any]) -> str:
    if row["sent_by"]:
        return ", ".join(f"{name} {rate:.1f}" for name, rate in row["sent_by"].items())
    nearly = ", ".join(f"{name} nearly ({rate:.1f})" for name, rate in row["nearly_sent_by"].items())
    return nearly or "no category of this set comes near it"


def gate_table(found: list[dict[str, Any]]) -> str:
    """Gates with their values and limits, in the format of `quantize run`."""
    rows = [(row["name"], *gate_figures(row), "passed" if row["passed"] else "FAILED", row["meaning"]) for row in found]
    return text_table(("gate", "value", "limit", "", "what it is"), rows)
