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
from collections.abc import Sequence
from dataclasses import dataclass, field
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
        as_served: figures by card, see as_served.py.
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    same_top1: np.ndarray
    layers: Sequence[dict[str, Any]]
    as_served: dict[str, dict[str, Any]] = field(default_factory=dict)


def parts(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Split the texts, by index: those of the top-level figures, and the long ones that are reported separately.

    If all texts are long, the top-level figures are over all of them.
    """
    short, long = ([i for i, text in enumerate(texts) if text.long is kind] for kind in (False, True))
    return (short, long) if short else (long, [])


def groups(categories: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Indices of the texts by category, and by family, which is a category's first part; sorted by name."""
    families = [name.partition("/")[0] for name in categories]
    return {
        kind: {name: [i for i, own in enumerate(names) if own == name] for name in sorted(set(names))}
        for kind, names in (("categories", categories), ("families", families))
    }


def figures(measured: Measured, texts: Sequence[Text]) -> dict[str, Any]:
    """The figures in report.json: of the short texts, of the long ones, by category and by position.

    Returns:
        `Fidelity` of eval/report/fidelity.py without `evaluated_on`: of the short texts, or of all if they are of one
        kind; `positions` are of the separate long texts or else of all.

    Raises:
        OverflowError: a loss is not finite, or so large that its perplexity is infinite.
    """
    columns = np.stack([measured.source_nll, measured.candidate_nll, measured.kl, measured.same_top1])  # (4, N) float64
    if not np.isfinite(columns).all():
        raise OverflowError("a loss is not finite")
    ends = np.cumsum([len(text.tokens) - 1 for text in texts])
    scored = list(zip(texts, np.split(columns, ends[:-1], axis=1), strict=True))
    top, long = ([scored[i] for i in part] for part in parts(texts))
    report = _part(top, measured.layers)
    if long:
        report["long"] = _part(long, [layer["long"] for layer in measured.layers])
    values = [columns for _, columns in long or top]
    report["positions"] = by_position(np.array([part.shape[1] for part in values]), *np.concatenate(values, axis=1))
    weights = [layer["weight_error"] for layer in measured.layers if "weight_error" in layer]
    report |= {"as_served": measured.as_served} if measured.as_served else {}
    return report | ({"weight_error": weights} if weights else {})


Scored = tuple[Text, np.ndarray]  # with its source_nll, candidate_nll, kl and same_top1 (4, positions) float64


def _part(scored: Sequence[Scored], layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures over these texts; `layers` were compared over the same texts."""
    agreement = [layer["agreement"] for layer in layers]
    by_name = {
        kind: {name: _table([scored[i] for i in members]) for name, members in group.items()}
        for kind, group in groups([text.category for text, _ in scored]).items()
    }
    return (
        _table(scored)
        | {
            "longest": max(len(text.tokens) for text, _ in scored),
            "router": {"agreement": agreement, "min": min(share for share in agreement if share is not None)},
            "hidden_error": [layer["hidden_error"] for layer in layers],
        }
        | by_name
        | {
            "per_text": [
                {"category": text.category, "tokens": len(kl), "kl": float(kl.mean())} for text, (_, _, kl, _) in scored
            ]
        }
    )


def table(texts: Sequence[Text], columns: np.ndarray) -> dict[str, Any]:
    """Figures over the texts of the top level alone.

    Args:
        columns: the source's nll, the candidate's, KL and same top-1 (4, N) float64, at the positions of all texts.
    """
    ends = np.cumsum([len(text.tokens) - 1 for text in texts])
    scored = list(zip(texts, np.split(columns, ends[:-1], axis=1), strict=True))
    return _table([scored[i] for i in parts(texts)[0]])


def _table(scored: Sequence[Scored]) -> dict[str, Any]:
    """Figures over these texts."""
    source, candidate, kl, same = np.concatenate([columns for _, columns in scored], axis=1)
    bits = math.log(2) * float(sum(text.scored_bytes for text, _ in scored))
    lengths = np.array([columns.shape[1] for _, columns in scored])
    return {
        "samples": len(scored),
        "tokens": len(kl),
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
        "interval": _intervals(lengths, np.stack([kl, same, candidate - source])),
    }


def _perplexity(source_nll: np.ndarray, candidate_nll: np.ndarray) -> dict[str, float]:
    source, candidate = (math.exp(nll.mean()) for nll in (source_nll, candidate_nll))
    return {"source": source, "candidate": candidate, "increase": candidate / source - 1}


def _intervals(lengths: np.ndarray, values: np.ndarray) -> dict[str, list[float]] | None:
    """Bootstrap intervals of mean KL, top-1 and the increase of perplexity, the rows of `values`, over samples."""
    if len(lengths) < 2:
        return None
    sums = np.add.reduceat(values, np.cumsum(lengths) - lengths, axis=1)  # (3, samples)
    drawn = np.random.default_rng(SEED).integers(len(lengths), size=(RESAMPLES, len(lengths)))
    means = sums[:, drawn].sum(-1) / lengths[drawn].sum(-1)  # (3, resamples)
    means[2] = np.expm1(means[2])
    ends = np.quantile(means, INTERVAL, axis=1).T.tolist()
    return dict(zip(("kl", "top1", "increase"), ends, strict=True))


def by_position(
    lengths: np.ndarray, source_nll: np.ndarray, candidate_nll: np.ndarray, kl: np.ndarray, same_top1: np.ndarray
) -> list[dict[str, Any]]:
    """A row, `Band` of eval/report/fidelity.py, for each band of positions that has tokens.

    Args:
        lengths: (texts,), scored tokens of each.
        source_nll, candidate_nll, kl, same_top1: (sum of lengths,), see `Measured`.
    """
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    ends = [start for _, start in BANDS[1:]] + [None]
    bands = [
        (name, start, end, (position >= start) & (position < (end or np.inf)))
        for (name, start), end in zip(BANDS, ends, strict=True)
    ]
    return [
        {
            "name": name,
            "from": start,
            "to": end,
            "samples": int((lengths >= max(start, 1)).sum()),
            "tokens": int(inside.sum()),
            "perplexity": _perplexity(source_nll[inside], candidate_nll[inside]),
            "kl": {"mean": float(kl[inside].mean())},
            "top1": float(same_top1[inside].mean()),
        }
        for name, start, end, inside in bands
        if inside.any()
    ]
