"""Figures of a candidate against its source: perplexity, bits per byte, KL, top-1, by category of text.

KL is KL(source || candidate) in nats over the whole vocabulary at every scored position. Intervals are
95 % bootstrap intervals: whole samples are drawn with replacement, since the tokens of one text depend on
each other; a category with a single sample has no interval. comparison.py and scoring.py collect the values.

Long texts are reported separately: the top-level figures, which gates and tables read, are those of the
short texts, and `long` has the same figures for the long texts. A set with only one kind has no `long`.

The position of a scored token is its index in its text, counted from 0, so a token at position t is predicted from the
t tokens before it. The first token of a text is predicted from nothing and is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RESAMPLES, SEED, INTERVAL = 1000, 0, (0.025, 0.975)
# Name and first position of each band.
BANDS = (("first 256", 0), ("256 to 1k", 256), ("1k to 4k", 1024), ("beyond 4k", 4096))


@dataclass(frozen=True)
class Text:
    """One held-out sequence.

    Attributes:
        tokens: (T,) int64.
        category: e.g. code/rust.
        scored_bytes: UTF-8 bytes of the tokens that are predicted, all but the first.
        long: whether it counts as a long text.
    """

    tokens: torch.Tensor
    category: str
    scored_bytes: int
    long: bool = False


@dataclass(frozen=True)
class Measured:
    """One candidate against the source, at every scored position (N of them).

    Attributes:
        source_nll, candidate_nll: (N,) float64, −log p of the next token, nats.
        kl: (N,) float64, nats.
        same_top1: (N,) bool, whether both models find the same token most likely.
        layers: what `comparison.compare` found in each layer, perhaps with the `weight_error` of experts and attention.
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    same_top1: np.ndarray
    layers: Sequence[dict[str, Any]]


def parts(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Split the texts, by index: those of the top-level figures, and the long ones that are reported separately.

    If all texts are long, the top-level figures are over all of them.
    """
    short, long = ([i for i, text in enumerate(texts) if text.long is kind] for kind in (False, True))
    return (short, long) if short else (long, [])


def figures(measured: Measured, texts: Sequence[Text]) -> dict[str, Any]:
    """The figures in report.json: of the short texts, of the long ones, by category and by position.

    Returns:
        `Fidelity` of eval/report/schema.py without `evaluated_on`: of the short texts, or of all if they are of one
        kind; `positions` are of the separate long texts or else of all.

    Raises:
        OverflowError: a loss is not finite, or so large that its perplexity is infinite.
    """
    if not all(np.isfinite(values).all() for values in (measured.source_nll, measured.candidate_nll, measured.kl)):
        raise OverflowError("a loss is not finite")
    top, long = parts(texts)
    report = _part(measured, texts, top, measured.layers)
    if long:
        report["long"] = _part(measured, texts, long, [layer["long"] for layer in measured.layers])
    lengths = _lengths(texts)
    mask = np.repeat(np.isin(np.arange(len(texts)), long or top), lengths)
    columns = (measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask], measured.same_top1[mask])
    report["positions"] = by_position(lengths[long or top], *columns)
    weights = [layer["weight_error"] for layer in measured.layers if "weight_error" in layer]
    return report | ({"weight_error": weights} if weights else {})


def _lengths(texts: Sequence[Text]) -> np.ndarray:
    """Scored positions of each text (texts,): all but the first."""
    return np.array([len(text.tokens) - 1 for text in texts])


def _part(
    measured: Measured, texts: Sequence[Text], indices: Sequence[int], layers: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """All figures over the texts with these indices; `layers` were compared over the same texts."""
    agreement = [layer["agreement"] for layer in layers]
    kl = np.split(measured.kl, np.cumsum(_lengths(texts))[:-1])  # of each text
    names = {i: texts[i].category for i in indices}
    families = {i: name.partition("/")[0] for i, name in names.items()}

    def table(members: Iterable[int]) -> dict[str, Any]:
        return _table(measured, texts, np.isin(np.arange(len(texts)), list(members)))

    def by(group: dict[int, str]) -> dict[str, Any]:
        return {name: table(i for i in indices if group[i] == name) for name in sorted(set(group.values()))}

    return table(indices) | {
        "longest": max(len(texts[i].tokens) for i in indices),
        "router": {"agreement": agreement, "min": min(share for share in agreement if share is not None)},
        "hidden_error": [layer["hidden_error"] for layer in layers],
        "categories": by(names),
        "families": by(families),
        "per_text": [{"category": names[i], "tokens": len(kl[i]), "kl": float(kl[i].mean())} for i in indices],
    }


def _table(measured: Measured, texts: Sequence[Text], members: np.ndarray) -> dict[str, Any]:
    """Figures over some texts, which `members` (texts,) bool selects."""
    lengths = _lengths(texts)
    mask = np.repeat(members, lengths)
    source, candidate, kl = measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask]
    same = measured.same_top1[mask]
    bits = math.log(2) * float(np.array([text.scored_bytes for text in texts])[members].sum())
    return {
        "samples": int(members.sum()),
        "tokens": int(mask.sum()),
        "perplexity": _perplexity(source, candidate),
        "bits_per_byte": {
            name: float(nll.sum()) / bits if bits else None
            for name, nll in (("source", source), ("candidate", candidate))
        },
        "kl": {
            "mean": float(kl.mean()),
            "median": float(np.median(kl)),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
        },
        "top1": float(same.mean()),
        "interval": _intervals(lengths[members], kl, same, candidate - source),
    }


def _perplexity(source_nll: np.ndarray, candidate_nll: np.ndarray) -> dict[str, float]:
    source, candidate = (math.exp(nll.mean()) for nll in (source_nll, candidate_nll))
    return {"source": source, "candidate": candidate, "increase": candidate / source - 1}


def _intervals(
    lengths: np.ndarray, kl: np.ndarray, same: np.ndarray, loss: np.ndarray
) -> dict[str, list[float]] | None:
    """Bootstrap intervals of mean KL, top-1 and the increase of perplexity, over samples of these lengths."""
    if len(lengths) < 2:
        return None
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    sums = np.stack([np.add.reduceat(values, starts) for values in (kl, same.astype(float), loss)])  # (3, samples)
    drawn = np.random.default_rng(SEED).integers(len(lengths), size=(RESAMPLES, len(lengths)))
    means = sums[:, drawn].sum(-1) / lengths[drawn].sum(-1)  # (3, resamples)
    means[2] = np.expm1(means[2])
    low, high = np.quantile(means, INTERVAL, axis=1)
    return {name: [float(low[i]), float(high[i])] for i, name in enumerate(("kl", "top1", "increase"))}


def by_position(
    lengths: np.ndarray, source_nll: np.ndarray, candidate_nll: np.ndarray, kl: np.ndarray, same_top1: np.ndarray
) -> list[dict[str, Any]]:
    """A row for each band of positions that has tokens.

    Args:
        lengths: (texts,), scored tokens of each.
        source_nll, candidate_nll, kl, same_top1: (sum of lengths,), see `Measured`.

    Returns:
        `Band` of eval/report/schema.py each.
    """
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    ends = [start for _, start in BANDS[1:]] + [None]
    rows = []
    for (name, start), end in zip(BANDS, ends, strict=True):
        in_band = (position >= start) & (position < (end or np.inf))
        if not in_band.any():
            continue
        rows.append(
            {
                "name": name,
                "from": start,
                "to": end,
                "samples": int((lengths >= max(start, 1)).sum()),
                "tokens": int(in_band.sum()),
                "perplexity": _perplexity(source_nll[in_band], candidate_nll[in_band]),
                "kl": {"mean": float(kl[in_band].mean())},
                "top1": float(same_top1[in_band].mean()),
            }
        )
    return rows
