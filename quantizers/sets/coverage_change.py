"""The load of every expert with one calibration set compared with another.

Sets are seldom of one size, so shares of the routed tokens are compared. An expert is called covered if its share would
give it `min_routed_tokens` in a set of as many tokens as the smaller of the two has.

Legend: L layers, C categories of either set, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quantizers.eval.coverage.figures import (
    CategoryCoverage,
    ExpertShare,
    LayerLoad,
    LayerRouting,
    RoutedSet,
    RoutingChange,
    SetName,
)
from quantizers.eval.coverage.routing import Routed
from quantizers.eval.coverage.summary import HELPFUL, WORST, entropy, gates, named, pairs, summarise
from quantizers.recipe.schema import CoverageGate
from quantizers.system.formatting import text_table


def compare_counts(before: Routed, after: Routed, rule: CoverageGate, sets: Sequence[SetName]) -> RoutingChange:
    """The experts that the second set covers and no longer covers, compared with the first.

    The share of an expert `of_even` is divided by the even share 1 / E. What has `moved` in a layer is the total
    variation distance of the shares, half the sum of their differences.
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

    def listed(chosen: Sequence[int]) -> list[ExpertShare]:
        return [
            ExpertShare(
                layer=numbers[row],
                expert=expert,
                before=int(counts[0, row, expert]),
                after=int(counts[1, row, expert]),
                before_of_even=float(evens[0, row, expert]),
                after_of_even=float(evens[1, row, expert]),
            )
            for row, expert in (divmod(pair, counts.shape[2]) for pair in chosen)
        ]

    def senders(n: int, chosen: np.ndarray) -> list[dict[str, int]]:
        tokens = sent[n][:, chosen].T  # (pairs, C)
        order = np.argsort(-tokens, axis=1, kind="stable")[:, :HELPFUL]
        return [{names[c]: int(row[c]) for c in most if row[c]} for most, row in zip(order, tokens, strict=True)]

    def load(n: int, i: int) -> LayerLoad:
        of_layer = counts[n, i]
        return LayerLoad(routed_tokens=of_layer.tolist(), shares=shares[n, i].tolist(), entropy=entropy(of_layer))

    def layer(i: int) -> LayerRouting:
        first, second = load(0, i), load(1, i)
        return LayerRouting(
            layer=numbers[i],
            before=first,
            after=second,
            entropy_change=second.entropy - first.entropy,
            moved=float(np.abs(shares[1, i] - shares[0, i]).sum() / 2),
        )

    def side(n: int, routed: Routed) -> RoutedSet:
        of_layers = list(routed.counts)
        whole = summarise(of_layers, routed.categories, minimum, routed.layers)
        return RoutedSet(
            **sets[n].given(),
            min=whole.min,
            median=whole.median,
            uncovered=whole.uncovered,
            uncovered_at_common=int((~covered[n]).sum()),
            pairs=whole.pairs,
            min_entropy=whole.min_entropy,
            tokens=dict(zip(routed.categories, routed.tokens.tolist(), strict=True)),
            gates=gates(whole, of_layers, routed.categories, rule),
        )

    won, lost = ~covered[0] & covered[1], covered[0] & ~covered[1]
    languages = [
        CategoryCoverage(category=name, won=int(a), lost=int(b)) for name, a, b in zip(names, *changes, strict=True)
    ]
    return RoutingChange(
        common_tokens=common,
        min_routed_tokens=minimum,
        won=pairs(won, numbers),
        lost=pairs(lost, numbers),
        won_by=senders(1, won),
        lost_by=senders(0, lost),
        languages=sorted(languages, key=lambda row: -row.won - row.lost),
        fewer=listed([pair for pair in order if ratio.flat[pair] < 0][:WORST]),
        more=listed([pair for pair in reversed(order) if ratio.flat[pair] > 0][:WORST]),
        per_layer=[layer(i) for i in range(len(numbers))],
        before=side(0, before),
        after=side(1, after),
    )


def labels(names: Sequence[str], files: Sequence[Path]) -> list[str]:
    """Labels of sets: their names; if two are equal, their shortest distinct file paths; else numbers."""
    paths = [file.resolve() for file in files]
    longest = max(len(path.parts) for path in paths)
    ends = (["/".join(path.parts[-n:]) for path in paths] for n in range(1, longest + 1))
    numbered = [f"{path.name} ({number})" for number, path in enumerate(paths, 1)]
    return next((choice for choice in (list(names), *ends) if len(set(choice)) == len(choice)), numbered)


def compare_table(change: RoutingChange) -> str:
    """Text output of `quantize coverage --compare`."""
    first = change.before.label
    second = change.after.label
    common = change.common_tokens
    minimum = change.min_routed_tokens
    sides = [
        (
            side.label, f"{sum(side.tokens.values()):,}", f"{side.min:,}", f"{side.median:,.0f}",
            f"{side.uncovered:,}", f"{side.uncovered_at_common:,}", f"{side.min_entropy:.3f}",
        )
        for side in (change.before, change.after)
    ]  # fmt: skip
    columns = ("set", "tokens", "min", "median", f"below {minimum:,}", "at equal size", "least entropy")
    depth = [
        (
            row.layer,
            f"{row.before.entropy:.3f}",
            f"{row.after.entropy:.3f}",
            f"{row.entropy_change:+.3f}",
            f"{row.moved:.1%}",
        )
        for row in sorted(change.per_layer, key=lambda row: -row.moved)[:WORST]
    ]
    left_out = len(change.per_layer) - len(depth)
    changed = [(row.category, row.won, row.lost) for row in change.languages if row.won or row.lost]
    lines = [
        text_table(columns, sides),
        "",
        f"Whether an expert is covered is decided by its share: at equal size, {common:,} tokens each, it would get at "
        f"least {minimum:,} routed tokens.",
        f"newly covered by {second}:      {named(change.won) or 'none'}",
        f"no longer covered by {second}:  {named(change.lost) or 'none'}",
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
    for experts, word in ((change.more, "larger"), (change.fewer, "smaller")):
        rows = [
            (
                row.layer,
                row.expert,
                f"{row.before_of_even:.1%}",
                f"{row.after_of_even:.1%}",
                f"{row.before:,}",
                f"{row.after:,}",
            )
            for row in experts
        ]
        if rows:
            lines += ["", f"Experts with a {word} share in {second}; an even load is 100 %", text_table(header, rows)]
    return "\n".join(lines)
