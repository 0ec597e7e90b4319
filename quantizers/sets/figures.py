"""Figures of calibration sets that were measured side by side: of each set, of each pair of sets, of each source.

Everything here is over the short texts, as in a report; the long ones are one more field. See estimate.py for how
intervals, p-values and verdicts come about.

Legend: K draws, n texts, L layers with experts that were quantized, C categories, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from quantizers.eval.coverage.figures import SetName
from quantizers.eval.coverage.routing import Routed
from quantizers.eval.fidelity.metrics import Text, groups, parts
from quantizers.eval.fidelity.paired import FEWEST
from quantizers.recipe.schema import CoverageGate
from quantizers.system.formatting import several

from .coverage_change import compare_counts
from .estimate import ERROR, POWER, Estimate, Verdict, holm, log_ratio, verdict

EFFECTS: dict[Verdict, str] = {"worse": "helps", "better": "hurts"}  # of what is left out; other verdicts as they are


@dataclass(frozen=True)
class MeasuredSet:
    """Measurements of one set's draws; sums are over each text's scored tokens, see `metrics.Measured`."""

    label: str  # what to call it, distinct among the sets
    name: str  # as in the set
    file: str  # where it was read
    samples: list[int]  # (K) of each draw
    tokens: list[int]  # (K) of each draw
    different: int  # how many of the draws hold different texts
    kl: np.ndarray  # (K, n) sums
    top1: np.ndarray  # (K, n) sums
    nll: np.ndarray  # (K, n) sums
    same: np.ndarray  # (K, n) the source's expert choices that the output makes too
    hidden_error: np.ndarray  # (K, layers)
    routed: Routed  # calibration tokens routed to each expert, of all draws together

    @property
    def draws(self) -> int:
        """K."""
        return len(self.kl)


@dataclass(frozen=True)
class Scored:
    """The texts that all sets were measured on."""

    texts: Sequence[Text]
    nll: np.ndarray  # (n,) the source's −log p, summed over each text's scored tokens
    choices: np.ndarray  # (n,) the source's expert choices, in all layers

    @property
    def tokens(self) -> np.ndarray:
        """Scored tokens of each, (n,)."""
        return np.array([len(text.tokens) - 1 for text in self.texts], dtype=float)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """`ScoredText` of quantizers/sets/schema.py, of each text."""
        return [
            {"place": text.place, "category": text.category, "tokens": len(text.tokens) - 1, "long": text.long}
            for text in self.texts
        ]

    @property
    def top(self) -> list[int]:
        """Indices of the texts of all figures but those of the long ones."""
        return parts(self.texts)[0]

    @property
    def fields(self) -> dict[str, tuple[str, list[int]]]:
        """The kind of each field, and the indices of its texts."""
        top, long = parts(self.texts)
        grouped = groups([self.texts[i].category for i in top])
        single = list(grouped["categories"].values())
        fields = {}
        for name, members in grouped["families"].items():
            if members not in single:  # a family of one category is that category
                fields[name] = ("family", [top[i] for i in members])
        for name, members in grouped["categories"].items():
            fields[name] = ("category", [top[i] for i in members])
        return fields | ({"long texts": ("long", long)} if long else {})


def comparison(sets: Sequence[MeasuredSet], scored: Scored, rule: CoverageGate, error: float = ERROR) -> dict[str, Any]:
    """`sets` and `pairs` of `SetComparison` in quantizers/sets/schema.py.

    Args:
        sets: two or more, with equally many draws.
        rule: what a covered expert is.
        error: the probability that an interval misses the truth.
    """
    pairs = list(combinations(sets, 2))
    changes = _differences(pairs, scored, error)
    return {
        "sets": [set_figures(measured, scored, error) for measured in sets],
        "pairs": [
            {
                "first": a.label,
                "other": b.label,
                **change,
                "words": pair_words(a, b, change, len(scored.top)),
                "fields": _field_differences(a, b, scored, error),
                "routing": _routing(a, b, rule),
            }
            for (a, b), change in zip(pairs, changes, strict=True)
        ],
    }


def _differences(
    pairs: Sequence[tuple[MeasuredSet, MeasuredSet]], scored: Scored, error: float
) -> list[dict[str, Any]]:
    """Compare B with A for each pair; p-values are Holm-adjusted jointly, detectable effects are at error / pairs."""
    estimates = [log_ratio(b.kl[:, scored.top], a.kl[:, scored.top]) for a, b in pairs]
    adjusted = holm([estimate.p for estimate in estimates])
    detectable = [estimate.detectable(error / len(pairs)) for estimate in estimates]
    return [
        _difference(estimate, p, error) | {"detectable": None if seen is None else math.expm1(seen)}
        for estimate, p, seen in zip(estimates, adjusted, detectable, strict=True)
    ]


def set_figures(measured: MeasuredSet, scored: Scored, error: float = ERROR) -> dict[str, Any]:
    """`SetFigures` of quantizers/sets/schema.py."""
    top, tokens = scored.top, np.broadcast_to(scored.tokens, measured.kl.shape)
    source_nll, choices = (np.broadcast_to(array, measured.kl.shape) for array in (scored.nll, scored.choices))

    def mean(sums: np.ndarray, of: np.ndarray, members: Sequence[int]) -> dict[str, Any]:
        estimate = log_ratio(sums[:, members], of[:, members])
        ends = estimate.interval(error)
        return {"mean": math.exp(estimate.value), "interval": ends and [math.exp(end) for end in ends]}

    mean_nll = float(scored.nll[top].sum() / scored.tokens[top].sum())
    worse = log_ratio(measured.nll[:, top], source_nll[:, top])

    def increase(log: float) -> float:
        return math.expm1(mean_nll * math.expm1(log))

    ends = worse.interval(error)
    errors = measured.hidden_error
    return {
        "label": measured.label,
        "name": measured.name,
        "file": measured.file,
        "draws": measured.different,
        "samples": measured.samples,
        "tokens": measured.tokens,
        "kl": mean(measured.kl, tokens, top)
        | {"per_draw": (measured.kl[:, top].sum(1) / scored.tokens[top].sum()).tolist()},
        "kl_by_text": (measured.kl / scored.tokens).tolist(),
        "top1": mean(measured.top1, tokens, top),
        "perplexity": {
            "source": math.exp(mean_nll),
            "candidate": math.exp(mean_nll) * (1 + increase(worse.value)),
            "increase": increase(worse.value),
            "interval": ends and [increase(end) for end in ends],
        },
        "router": mean(measured.same, choices, top) if scored.choices.any() else None,
        "hidden_error": [
            {"mean": float(row.mean()), "low": float(row.min()), "high": float(row.max())} for row in errors.T
        ],
        "fields": {
            name: {
                "kind": kind,
                "texts": len(members),
                "tokens": int(scored.tokens[members].sum()),
                "kl": mean(measured.kl, tokens, members),
            }
            for name, (kind, members) in scored.fields.items()
        },
    }


def _difference(estimate: Estimate, adjusted: float, error: float) -> dict[str, Any]:
    ends = estimate.interval(error)
    return {
        "change": estimate.change,
        "interval": ends and [math.expm1(end) for end in ends],
        "p": estimate.p,
        "adjusted": adjusted,
        "verdict": verdict(estimate, adjusted, error),
    }


def _field_differences(a: MeasuredSet, b: MeasuredSet, scored: Scored, error: float) -> list[dict[str, Any]]:
    """Compare B with A in each field; p-values are Holm-adjusted over fields with enough texts."""
    fields = scored.fields
    estimates = [log_ratio(b.kl[:, members], a.kl[:, members]) for _, members in fields.values()]
    tested = [n for n, estimate in enumerate(estimates) if estimate.resamples is not None]
    adjusted = dict(zip(tested, holm([estimates[n].p for n in tested]), strict=True))
    return [
        {
            "name": name,
            "kind": kind,
            "texts": len(members),
            "first": float(a.kl[:, members].mean(0).sum() / scored.tokens[members].sum()),
            "other": float(b.kl[:, members].mean(0).sum() / scored.tokens[members].sum()),
            **_difference(estimate, adjusted.get(n, 1.0), error),
        }
        for n, ((name, (kind, members)), estimate) in enumerate(zip(fields.items(), estimates, strict=True))
    ]


def _routing(a: MeasuredSet, b: MeasuredSet, rule: CoverageGate) -> dict[str, Any]:
    names = [SetName(label=measured.label, name=measured.name, file=measured.file) for measured in (a, b)]
    return compare_counts(a.routed, b.routed, rule, names).as_dict()


def pair_words(a: MeasuredSet, b: MeasuredSet, difference: dict[str, Any], texts: int) -> str:
    """A sentence on which of two sets is better, from what `comparison` finds of them on so many texts."""
    if difference["verdict"] == "too few texts":
        return f"{a.label}, {b.label}: {_too_few(texts)}"
    if difference["verdict"] == "no difference" or difference["interval"] is None:
        what = f"{b.label} and {a.label}: no difference"
        return f"{what} that {several(a.draws, 'draw')} of {texts} texts could show{_seen(difference)}"
    low, high = sorted(map(abs, difference["interval"]))
    between = f"{percent(low, False)} to {percent(high, False)}"
    return f"{b.label} is {difference['verdict']} than {a.label} by {percent(abs(difference['change']))} ({between})"


def source_effects(whole: MeasuredSet, without: Sequence[MeasuredSet], scored: Scored) -> list[dict[str, Any]]:
    """`sources` of `SourceEffects` in quantizers/sets/schema.py: what the whole set loses without each source.

    Args:
        without: the same draws without one source, whose name is the label; `samples` and `tokens` are what it had.
    """
    rows = []
    differences = _differences([(whole, rest) for rest in without], scored, ERROR)
    for rest, difference in zip(without, differences, strict=True):
        effect = EFFECTS.get(difference["verdict"], difference["verdict"])
        words = {
            "helps": f"helps: without it KL is {percent(difference['change'])} larger",
            "hurts": f"hurts: without it KL is {percent(-difference['change'])} smaller",
            "too few texts": _too_few(len(scored.top)),
        }.get(effect, f"makes no difference that could be seen{_seen(difference)}")
        own = {"source": rest.label, "texts": rest.samples, "tokens": rest.tokens, "verdict": effect, "words": words}
        rows.append({key: difference[key] for key in ("change", "interval", "p", "adjusted")} | own)
    return sorted(rows, key=lambda row: -row["change"])


def decided(pairs: Sequence[dict[str, Any]]) -> bool:
    """Whether every pair has a verdict that further draws are not needed for."""
    return all(pair["verdict"] in ("better", "worse", "too few texts") for pair in pairs)


def percent(value: float, unit: bool = True) -> str:
    """A share in percent: `12 %`, `4.1 %`, `0.35 %`."""
    digits = 0 if abs(value) >= 0.0995 else 1 if abs(value) >= 0.00995 else 2
    return f"{100 * value:.{digits}f}" + " %" * unit


def _too_few(texts: int) -> str:
    return f"too few texts ({texts}) for a verdict, or too few that differ; {FEWEST} are needed"


def _seen(difference: dict[str, Any]) -> str:
    return f"; {percent(difference['detectable'])} would have been seen" if difference["detectable"] else ""


NOTES = {
    "power": f"What would have been seen is the difference that is found with a probability of {100 * POWER:.0f} %.",
    "holm": (
        "p and verdict are adjusted by Holm for all that are tested together: the pairs of sets, the fields of a pair, "
        "or the sources of a set. Intervals are not, so one may leave out 0 where the verdict is no difference."
    ),
    "fewer": (
        "Without a source a draw has fewer tokens: its effect is that of its texts and of their number. Write the set "
        "without it to a file, and `quantize compare` takes as many --tokens from both."
    ),
}
