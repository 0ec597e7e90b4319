"""The load of every expert with one calibration set compared with another.

Sets are seldom of one size, so shares of the routed tokens are compared. An expert is called covered if its share would
give it `min_routed_tokens` in a set of as many tokens as the smaller of the two has.

Legend: L layers, C categories of either set, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.eval.coverage.routing import Routed
from quantizers.eval.coverage.summary import HELPFUL, WORST, entropy, named, pairs, report
from quantizers.recipe.schema import CoverageGate
from quantizers.system.formatting import text_table

SIDES = ("before", "after")
KEPT = ("min", "median", "uncovered", "pairs", "min_entropy", "tokens", "gates")  # of the report on each set


def compare_counts(before: Routed, after: Routed, rule: CoverageGate) -> dict[str, Any]:
    """The experts that the second set covers and no longer covers, compared with the first.

    Returns:
        common_tokens: tokens of the smaller set, see above; won: pairs (layer, expert) that only the second set
        covers; lost: those that only the first covers; won_by, lost_by: for each of these the categories that send most
        tokens to it in the set that covers it; languages: for each category of either set the number of pairs that the
        second set's texts of it cover alone and the first's do not, and the reverse, most changes first; more, fewer:
        the pairs whose share changes most, with counts and `of_even`, which is the share divided by the even share
        1 / E; per_layer: of each side the counts, the shares and the entropy of the load, `entropy_change`, and
        `moved`, the share of the routed tokens that go to other experts (the total variation distance, half the sum of
        the differences of the shares); before, after: a summary of each set.
    """
    numbers, names = before.layers, sorted({*before.categories, *after.categories})
    sent = np.zeros((2, len(names), len(numbers), before.counts.shape[2]), dtype=np.int64)  # (2, C, L, E)
    for n, routed in enumerate((before, after)):
        sent[n, [names.index(name) for name in routed.categories]] = routed.counts.swapaxes(0, 1)
    counts = sent.sum(1)  # (2, L, E)
    sizes = np.array([routed.tokens.sum() for routed in (before, after)]).reshape(2, 1, 1)
    common, minimum = int(sizes.min()), rule.min_routed_tokens
    covered = counts * common >= minimum * sizes
    covered_by = sent * common >= minimum * sizes[..., None]
    changes = [(~covered_by[n] & covered_by[1 - n]).sum((1, 2)) for n in (0, 1)]  # two of (C,): won, lost
    scaled = counts * (common / sizes) + 1  # + 1: from 0 to 2 tokens is no infinite change
    ratio = np.log(scaled[1] / scaled[0])
    changed = counts[1] * sizes[0] != counts[0] * sizes[1]
    order = [int(pair) for pair in np.argsort(ratio, axis=None, kind="stable") if changed.flat[pair]]
    shares = counts / np.maximum(counts.sum(2, keepdims=True), 1)
    evens = shares * counts.shape[2]

    def listed(chosen: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"layer": numbers[a], "expert": b}
            | {side: int(counts[n, a, b]) for n, side in enumerate(SIDES)}
            | {f"{side}_of_even": float(evens[n, a, b]) for n, side in enumerate(SIDES)}
            for a, b in (divmod(pair, counts.shape[2]) for pair in chosen)
        ]

    def senders(n: int, chosen: np.ndarray) -> list[dict[str, int]]:
        tokens = sent[n][:, chosen].T  # (pairs, C)
        order = np.argsort(-tokens, axis=1, kind="stable")[:, :HELPFUL]
        return [{names[c]: int(row[c]) for c in most if row[c]} for most, row in zip(order, tokens, strict=True)]

    def layer(i: int) -> dict[str, Any]:
        load = [entropy(counts[n, i]) for n in (0, 1)]
        found = {
            side: {"routed_tokens": counts[n, i].tolist(), "shares": shares[n, i].tolist(), "entropy": load[n]}
            for n, side in enumerate(SIDES)
        }
        moved = float(np.abs(shares[1, i] - shares[0, i]).sum() / 2)
        return {"layer": numbers[i], **found, "entropy_change": load[1] - load[0], "moved": moved}

    def side(n: int, routed: Routed) -> dict[str, Any]:
        found = report(routed, rule)
        return {key: found[key] for key in KEPT} | {"uncovered_at_common": int((~covered[n]).sum())}

    won, lost = ~covered[0] & covered[1], covered[0] & ~covered[1]
    languages = [{"category": name, "won": int(a), "lost": int(b)} for name, a, b in zip(names, *changes, strict=True)]
    return {
        "common_tokens": common,
        "min_routed_tokens": minimum,
        "won": pairs(won, numbers),
        "lost": pairs(lost, numbers),
        "won_by": senders(1, won),
        "lost_by": senders(0, lost),
        "languages": sorted(languages, key=lambda row: -row["won"] - row["lost"]),
        "fewer": listed([pair for pair in order if ratio.flat[pair] < 0][:WORST]),
        "more": listed([pair for pair in reversed(order) if ratio.flat[pair] > 0][:WORST]),
        "per_layer": [layer(i) for i in range(len(numbers))],
        "before": side(0, before),
        "after": side(1, after),
    }


def labels(names: Sequence[str], files: Sequence[Path]) -> list[str]:
    """What to call sets: their names; if two are equal, their files, as short as still distinct; else numbers."""
    paths = [file.resolve() for file in files]
    ends = (["/".join(path.parts[-n:]) for path in paths] for n in range(1, max(len(path.parts) for path in paths) + 1))
    numbered = [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]
    return next((found for found in (list(names), *ends) if len(set(found)) == len(found)), numbered)


def compare_table(found: dict[str, Any]) -> str:
    """What `quantize coverage --compare` prints."""
    first, second = (found[side]["label"] for side in SIDES)
    common, minimum = found["common_tokens"], found["min_routed_tokens"]
    sides = [
        (
            one["label"], f"{sum(one['tokens'].values()):,}", f"{one['min']:,}", f"{one['median']:,.0f}",
            f"{one['uncovered']:,}", f"{one['uncovered_at_common']:,}", f"{one['min_entropy']:.3f}",
        )
        for one in (found[side] for side in SIDES)
    ]  # fmt: skip
    columns = ("set", "tokens", "min", "median", f"below {minimum:,}", "at equal size", "least entropy")
    depth = []
    for row in sorted(found["per_layer"], key=lambda row: -row["moved"])[:WORST]:
        loads = (f"{row[side]['entropy']:.3f}" for side in SIDES)
        depth.append((row["layer"], *loads, f"{row['entropy_change']:+.3f}", f"{row['moved']:.1%}"))
    left_out = len(found["per_layer"]) - len(depth)
    changed = [(row["category"], row["won"], row["lost"]) for row in found["languages"] if row["won"] or row["lost"]]
    lines = [
        text_table(columns, sides),
        "",
        f"Whether an expert is covered is decided by its share: at equal size, {common:,} tokens each, it would get at "
        f"least {minimum:,} routed tokens.",
        f"newly covered by {second}:      {named(found['won']) or 'none'}",
        f"no longer covered by {second}:  {named(found['lost']) or 'none'}",
        "",
        "Experts that the texts of a category alone cover, or no longer cover, at that size"
        + (f"; {len(changed) - WORST} categories more with --json" if len(changed) > WORST else ""),
        text_table(("category", "newly covered", "no longer covered"), changed[:WORST]) if changed else "none",
        "",
        "Entropy of the load, 1 is even; moved: share of the routed tokens that go to other experts"
        + (f"; the {len(depth)} layers where most move, {left_out} more with --json" if left_out else ""),
        text_table(("layer", first, second, "change", "moved"), sorted(depth)),
    ]
    header = ("layer", "expert", f"of even: {first}", second, f"tokens: {first}", second)
    for key, word in (("more", "larger"), ("fewer", "smaller")):
        rows = []
        for row in found[key]:
            shares, tokens = (f"{row[f'{side}_of_even']:.1%}" for side in SIDES), (f"{row[side]:,}" for side in SIDES)
            rows.append((row["layer"], row["expert"], *shares, *tokens))
        if rows:
            lines += ["", f"Experts with a {word} share in {second}; an even load is 100 %", text_table(header, rows)]
    return "\n".join(lines)
