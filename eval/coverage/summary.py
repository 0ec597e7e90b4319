"""Coverage of one set: routed tokens of every expert by category of text, gates on them, and their tables.

In the all-expert pass every expert sees every token, so its counts only prove that the pass works. Whether an expert is
well calibrated depends on how many tokens the router itself sends to it: those are counted here.

Legend: L layers, C categories, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError
from quantizers.system.formatting import percent, text_table

from .figures import Coverage, CoverageReport, Drawn, Gate, LayerCoverage, Saliency, WorstExpert

if TYPE_CHECKING:
    from .routing import Routed

SHARES = ("perplexity", "coverage")  # gates whose values are shares
NAMED = 20  # uncovered pairs (layer, expert) that a message lists at most
WORST = 15  # rows of a table: experts with the fewest tokens, or whose tokens change most
HELPFUL = 3  # categories named for each of them


def summarise(
    counts: Sequence[np.ndarray], categories: Sequence[str], minimum: int, numbers: Sequence[int]
) -> Coverage:
    """Routed tokens over all layers, and layer by layer.

    Args:
        counts: for each layer with experts (C, E) int64; `numbers` are theirs.
        minimum: routed tokens that an expert needs to count as covered.
    """
    totals = np.stack([layer.sum(0) for layer in counts])  # (L, E)
    layers = [
        LayerCoverage(
            layer=number,
            min=int(row.min()),
            median=float(np.median(row)),
            uncovered=int((row < minimum).sum()),
            worst_expert=int(row.argmin()),
            entropy=entropy(row),
            routed_tokens=row.tolist(),
        )
        for number, row in zip(numbers, totals, strict=True)
    ]
    uncovered = pairs(totals < minimum, numbers)
    return Coverage(
        min_routed_tokens=minimum,
        min=int(totals.min()),
        median=float(np.median(totals)),
        pairs=int(totals.size),
        uncovered=len(uncovered),
        uncovered_pairs=uncovered,
        min_entropy=min(layer.entropy for layer in layers),
        per_layer=layers,
        routed_by_category={name: int(sum(layer[i].sum() for layer in counts)) for i, name in enumerate(categories)},
    )


def pairs(chosen: np.ndarray, numbers: Sequence[int]) -> list[list[int]]:
    """The layer's number and the expert of each that is chosen, (L, E) bool."""
    return [[numbers[int(layer)], int(expert)] for layer, expert in np.argwhere(chosen)]


def least(values: np.ndarray) -> list[tuple[int, int]]:
    """Row and expert of the WORST least values (L, E), ascending."""
    order = np.argsort(values, axis=None, kind="stable")[:WORST]
    return [divmod(int(pair), values.shape[1]) for pair in order]


def helpful(values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """The HELPFUL categories with the largest values (C,) above 0, descending."""
    order = np.argsort(-values, kind="stable")[:HELPFUL]
    return {names[i]: float(values[i]) for i in order if values[i] > 0}


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
                f"{where}: verify.coverage.categories.{floor}",
                "the calibration set has no such category",
                f"it has {', '.join(known)}",
            )


def gates(summary: Coverage, counts: Sequence[np.ndarray], categories: Sequence[str], rule: CoverageGate) -> list[Gate]:
    """The recipe's gates: the share of pairs below the minimum and below each category's floor, and the entropy.

    `summary` is what `summarise` made of the same counts, (C, E) int64 of each layer.
    """
    most, words = rule.max_uncovered, "share of experts with fewer than {} routed tokens"
    share = summary.uncovered / summary.pairs
    results = [gate("coverage", share, most, words.format(rule.min_routed_tokens))]
    for floor, minimum in rule.categories.items():
        rows = members(floor, categories)
        below = float(np.mean([layer[rows].sum(0) < minimum for layer in counts]))
        results.append(gate(f"coverage {floor}", below, most, f"{words.format(minimum)} of {floor}"))
    if rule.min_entropy is not None:
        value, limit = summary.min_entropy, rule.min_entropy
        meaning = "entropy of the load in the most uneven layer; 1 is even"
        passed = value >= limit
        results.append(Gate(name="entropy", passed=passed, value=value, limit=limit, meaning=meaning, at_least=True))
    return results


def gate(name: str, value: float | None, limit: float, meaning: str) -> Gate:
    """A gate on a value that is to be at most at its limit; None, which stands for no number, has failed."""
    return Gate(name=name, passed=value is not None and value <= limit, value=value, limit=limit, meaning=meaning)


def named(listed: Sequence[Sequence[int]]) -> str:
    """Pairs as text: `layer 1 expert 3, layer 2 expert 0`, and how many are left out."""
    text = ", ".join(f"layer {layer} expert {expert}" for layer, expert in listed[:NAMED])
    return text + (f" and {len(listed) - NAMED:,} more" if len(listed) > NAMED else "")


def report(
    routed: Routed,
    rule: CoverageGate,
    *,
    model: str,
    name: str,
    drawn: Drawn | None = None,
    saliency: Saliency | None = None,
) -> CoverageReport:
    """Everything that `quantize coverage` reports about one model and one set, gates included; `name` is the set's."""
    counts, categories = list(routed.counts), routed.categories
    summary = summarise(counts, categories, rule.min_routed_tokens, routed.layers)
    return CoverageReport(
        **summary.given(),
        tokens=dict(zip(categories, routed.tokens.tolist(), strict=True)),
        tied_choices=int(routed.close.sum()),
        worst=worst(routed),
        counts=dict(zip(categories, routed.counts.swapaxes(0, 1).tolist(), strict=True)),
        gates=gates(summary, counts, categories, rule),
        model=model,
        set=name,
        drawn=drawn,
        saliency=saliency,
    )


def worst(routed: Routed) -> list[WorstExpert]:
    """The experts with the fewest tokens, and the categories that send, or nearly send, the most tokens to them."""
    totals = routed.counts.sum(1)  # (L, E)
    even = totals.sum(1) / totals.shape[1]  # (L,), tokens per expert under an even load

    def rates(counts: np.ndarray) -> dict[str, float]:
        """In tokens per thousand of the category; counts is (C,)."""
        return helpful(1000 * counts / np.maximum(routed.tokens, 1), routed.categories)

    return [
        WorstExpert(
            layer=routed.layers[layer],
            expert=expert,
            tokens=int(totals[layer, expert]),
            share_of_even=float(totals[layer, expert] / even[layer]) if even[layer] else 0.0,
            sent_by=rates(routed.counts[layer, :, expert]),
            nearly_sent_by=rates(routed.near[layer, :, expert]),
        )
        for layer, expert in least(totals)
    ]


def coverage_table(report: CoverageReport) -> str:
    """Text output of `quantize coverage`."""
    rows = []
    for row in report.worst:
        sent = ", ".join(f"{name} {rate:.1f}" for name, rate in row.sent_by.items())
        nearly = ", ".join(f"{name} nearly ({rate:.1f})" for name, rate in row.nearly_sent_by.items())
        helps = sent or nearly or "no category of this set comes near it"
        rows.append((row.layer, row.expert, f"{row.tokens:,}", f"{row.share_of_even:.1%}", helps))
    parts = [
        f"{sum(report.tokens.values()):,} tokens in {len(report.tokens)} categories; routed tokens per expert: min "
        f"{report.min:,}, median {report.median:,.0f}; {report.uncovered:,} of {report.pairs:,} below "
        f"{report.min_routed_tokens:,}; load entropy at least {report.min_entropy:.3f}",
        text_table(("layer", "expert", "tokens", "of even", "what would help (of 1,000 tokens of the category)"), rows),
    ]
    if report.drawn:
        asked, whole = report.drawn.asked, report.drawn.tokens
        parts.append(
            f"the recipe asks for {asked:,} tokens of the set, which holds {whole:,}: all are used"
            if asked >= whole
            else f"drawn evenly over the categories: {asked:,} of the set's {whole:,} tokens"
        )
    if report.uncovered:
        parts.append(f"uncovered: {named(report.uncovered_pairs)}")
    if report.tied_choices:
        parts.append(f"{report.tied_choices:,} choices hang on a margin below 1e-6")
    return "\n\n".join([*parts, gate_table(report.gates)])


def gate_figures(gate: Gate) -> tuple[str, str]:
    """A gate's value and its limit as people read them: shares in per cent, anything else as a number."""
    shown = percent if gate.name.partition(" ")[0] in SHARES else "{:.4g}".format
    value = "no number" if gate.value is None else shown(gate.value)
    return value, f"{'>=' if gate.at_least else '<='} {shown(gate.limit)}"


def gate_table(gates: Sequence[Gate]) -> str:
    """Gates with their values and limits, in the format of `quantize run`."""
    rows = [(row.name, *gate_figures(row), "passed" if row.passed else "FAILED", row.meaning) for row in gates]
    return text_table(("gate", "value", "limit", "", "what it is"), rows)
