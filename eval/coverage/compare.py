"""The load of every expert with one calibration set compared with another.

Sets are seldom of one size, so shares of the routed tokens are compared, not counts. An expert is called covered
if its share would give it `min_routed_tokens` in a set of as many tokens as the smaller of the two has.

Legend: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.recipe.schema import CoverageGate
from quantizers.system.formatting import text_table

from .routing import Routed
from .summary import WORST, entropy, named, report

SIDES = ("before", "after")


def compare_counts(before: Routed, after: Routed, rule: CoverageGate) -> dict[str, Any]:
    """The experts that the second set covers and no longer covers, compared with the first.

    Returns:
        common_tokens: tokens of the smaller set, see above; won: pairs (layer, expert) that only the second set
        covers; lost: those that only the first covers; more, fewer: the pairs whose share changes most, with counts
        and `of_even`, which is the share divided by the even share 1 / E; per_layer: of each side the counts, the
        shares and the entropy of the load, `entropy_change`, and `moved`, the share of the routed tokens that go to
        other experts (the total variation distance, half the sum of the differences of the shares); before, after: a
        summary of each set.
    """
    old, new = (routed.counts.sum(1) for routed in (before, after))  # (L, E)
    sizes = [int(routed.tokens.sum()) for routed in (before, after)]
    common, minimum = min(sizes), rule.min_routed_tokens
    old_scaled, new_scaled = (counts * (common / size) for counts, size in zip((old, new), sizes, strict=True))
    covered, covers = (counts * common >= minimum * size for counts, size in zip((old, new), sizes, strict=True))
    ratio = np.log((new_scaled + 1) / (old_scaled + 1))  # + 1: from 0 to 2 tokens is no infinite change
    changed = new * sizes[0] != old * sizes[1]
    order = [int(pair) for pair in np.argsort(ratio, axis=None, kind="stable") if changed.flat[pair]]
    shares, evens = zip(*(_shares(counts) for counts in (old, new)), strict=True)

    def listed(pairs: Sequence[int]) -> list[dict[str, Any]]:
        places = [(pair // old.shape[1], pair % old.shape[1]) for pair in pairs]
        return [
            {"layer": before.layers[a], "expert": b}
            | {side: int(counts[a, b]) for side, counts in zip(SIDES, (old, new), strict=True)}
            | {f"{side}_of_even": float(even[a, b]) for side, even in zip(SIDES, evens, strict=True)}
            for a, b in places
        ]

    def pairs(chosen: np.ndarray) -> list[list[int]]:
        return [[before.layers[int(a)], int(b)] for a, b in np.argwhere(chosen)]

    def layer(i: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            side: {"routed_tokens": counts[i].tolist(), "shares": share[i].tolist(), "entropy": entropy(counts[i])}
            for side, counts, share in zip(SIDES, (old, new), shares, strict=True)
        }
        change = found["after"]["entropy"] - found["before"]["entropy"]
        moved = float(np.abs(shares[1][i] - shares[0][i]).sum() / 2)
        return {"layer": before.layers[i], **found, "entropy_change": change, "moved": moved}

    return {
        "common_tokens": common,
        "min_routed_tokens": minimum,
        "won": pairs(~covered & covers),
        "lost": pairs(covered & ~covers),
        "fewer": listed([pair for pair in order if ratio.flat[pair] < 0][:WORST]),
        "more": listed([pair for pair in reversed(order) if ratio.flat[pair] > 0][:WORST]),
        "per_layer": [layer(i) for i in range(len(old))],
        "before": _short(before, rule) | {"uncovered_at_common": int((~covered).sum())},
        "after": _short(after, rule) | {"uncovered_at_common": int((~covers).sum())},
    }


def _shares(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of (L, E) counts: each expert's share of its layer's routed tokens, and that relative to an even load."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares, shares * counts.shape[1]


def _short(routed: Routed, rule: CoverageGate) -> dict[str, Any]:
    found = report(routed, rule)
    keys = ("min", "median", "uncovered", "pairs", "min_entropy", "tokens", "gates")
    return {key: found[key] for key in keys}


def labels(names: Sequence[str], files: Sequence[Path]) -> list[str]:
    """What to call two sets: their names, or their files, as short as still distinct, where the names are equal.

    One file given twice is told apart by a number.
    """
    if names[0] != names[1]:
        return list(names)
    paths = [file.resolve() for file in files]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        ends = ["/".join(path.parts[-parts:]) for path in paths]
        if ends[0] != ends[1]:
            return ends
    return [f"{paths[0].name} ({number})" for number in (1, 2)]


def compare_table(found: dict[str, Any]) -> str:
    """What `quantize coverage --compare` prints."""
    first, second = (found[side]["label"] for side in SIDES)
    common, minimum = found["common_tokens"], found["min_routed_tokens"]
    sides = [
        (
            found[side]["label"], f"{sum(found[side]['tokens'].values()):,}", f"{found[side]['min']:,}",
            f"{found[side]['median']:,.0f}", f"{found[side]['uncovered']:,}",
            f"{found[side]['uncovered_at_common']:,}", f"{found[side]['min_entropy']:.3f}",
        )
        for side in SIDES
    ]  # fmt: skip
    columns = ("set", "tokens", "min", "median", f"below {minimum:,}", "at equal size", "least entropy")
    layers = sorted(found["per_layer"], key=lambda row: -row["moved"])[:WORST]
    left_out = len(found["per_layer"]) - len(layers)
    depth = [
        (
            row["layer"], *(f"{row[side]['entropy']:.3f}" for side in SIDES), f"{row['entropy_change']:+.3f}",
            f"{row['moved']:.1%}",
        )
        for row in layers
    ]  # fmt: skip
    lines = [
        text_table(columns, sides),
        "",
        f"Whether an expert is covered is decided by its share: at equal size, {common:,} tokens each, it would get at "
        f"least {minimum:,} routed tokens.",
        f"newly covered by {second}:      {named(found['won']) or 'none'}",
        f"no longer covered by {second}:  {named(found['lost']) or 'none'}",
        "",
        "Entropy of the load, 1 is even; moved: share of the routed tokens that go to other experts"
        + (f"; the {len(layers)} layers where most move, {left_out} more with --json" if left_out else ""),
        text_table(("layer", first, second, "change", "moved"), sorted(depth)),
    ]
    for word in ("more", "fewer"):
        rows = [
            (
                row["layer"], row["expert"], f"{row['before_of_even']:.1%}", f"{row['after_of_even']:.1%}",
                f"{row['before']:,}", f"{row['after']:,}",
            )
            for row in found[word]
        ]  # fmt: skip
        if rows:
            title = (
                f"Experts with a {'larger' if word == 'more' else 'smaller'} share in {second}; an even load is 100 %"
            )
            header = ("layer", "expert", f"of even: {first}", second, f"tokens: {first}", second)
            lines += ["", title, text_table(header, rows)]
    return "\n".join(lines)
