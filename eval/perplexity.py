"""Figures of a candidate against its source: perplexity, bits per byte, KL, top-1, by category of text.

KL is KL(source || candidate) in nats over the whole vocabulary at every scored position. Intervals are
95 % bootstrap intervals: whole samples are drawn with replacement, since tokens of one text depend on
each other; where a category has one sample there is none. lockstep.py runs the models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

RESAMPLES, SEED, INTERVAL = 1000, 0, (0.025, 0.975)


@dataclass(frozen=True)
class Text:
    """One held-out sequence.

    Attributes:
        tokens: (T,) int64.
        category: e.g. code/rust.
        scored_bytes: UTF-8 bytes of the tokens that are predicted, all but the first.
    """

    tokens: torch.Tensor
    category: str
    scored_bytes: int


@dataclass
class Measured:
    """One candidate against the source, at every scored position (N of them).

    Attributes:
        source_nll, candidate_nll: (N,) float64, −log p of the token that follows, nats.
        kl: (N,) float64, nats.
        same_top1: (N,) bool.
        lengths: scored positions of each sequence.
        router_agreement: per layer, the share of the source's choices that the candidate makes too.
        hidden_error: per layer, ‖h_candidate − h_source‖ / ‖h_source‖ over all tokens.
        weight_error: per layer, relative error of experts and attention; empty where not asked for.
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    same_top1: np.ndarray
    lengths: list[int]
    router_agreement: list[float]
    hidden_error: list[float]
    weight_error: list[dict[str, float]] = field(default_factory=list)


def figures(measured: Measured, texts: Sequence[Text]) -> dict[str, Any]:
    """The numbers of report.json: over all positions, and by category.

    Returns:
        perplexity {source, candidate, increase (relative)}, bits_per_byte, kl {mean, median, p99, max},
        top1, interval {kl, top1, increase} (None with one sample), tokens, samples, router {agreement per
        layer, min}, hidden_error per layer, categories, families (`code` for `code/rust` and its like); and
        weight_error where it was asked for.
    """
    sizes = np.array([text.scored_bytes for text in texts])
    names = [text.category for text in texts]
    categories = {
        name: _table(measured, np.array([other == name for other in names]), sizes) for name in sorted(set(names))
    }
    above = [name.partition("/")[0] for name in names]
    families = {
        name: _table(measured, np.array([other == name for other in above]), sizes) for name in sorted(set(above))
    }
    return (
        _table(measured, np.ones(len(texts), dtype=bool), sizes)
        | {
            "router": {"agreement": measured.router_agreement, "min": min(measured.router_agreement)},
            "hidden_error": measured.hidden_error,
            "categories": categories,
            "families": families,
        }
        | ({"weight_error": measured.weight_error} if measured.weight_error else {})
    )


def _table(measured: Measured, members: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    """Figures over the samples (N,) bool that are members."""
    lengths = np.array(measured.lengths)
    mask = np.repeat(members, lengths)
    source, candidate, kl = measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask]
    same = measured.same_top1[mask]
    perplexity = [float(np.exp(nll.mean())) for nll in (source, candidate)]
    bits = math.log(2) * sizes[members].sum()
    return {
        "samples": int(members.sum()),
        "tokens": int(mask.sum()),
        "perplexity": {
            "source": perplexity[0],
            "candidate": perplexity[1],
            "increase": perplexity[1] / perplexity[0] - 1,
        },
        "bits_per_byte": {"source": float(source.sum() / bits), "candidate": float(candidate.sum() / bits)},
        "kl": {
            "mean": float(kl.mean()),
            "median": float(np.median(kl)),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
        },
        "top1": float(same.mean()),
        "interval": _intervals(lengths[members], kl, same, candidate - source),
    }


def _intervals(
    lengths: np.ndarray, kl: np.ndarray, same: np.ndarray, loss: np.ndarray
) -> dict[str, list[float]] | None:
    """Bootstrap intervals of mean KL, top-1 and the increase of perplexity, from samples of these lengths."""
    if len(lengths) < 2:
        return None
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    sums = np.stack([np.add.reduceat(values, starts) for values in (kl, same.astype(float), loss)])  # (3, samples)
    drawn = np.random.default_rng(SEED).integers(len(lengths), size=(RESAMPLES, len(lengths)))
    means = sums[:, drawn].sum(-1) / lengths[drawn].sum(-1)  # (3, resamples)
    means[2] = np.expm1(means[2])
    low, high = np.quantile(means, INTERVAL, axis=1)
    return {name: [float(low[i]), float(high[i])] for i, name in enumerate(("kl", "top1", "increase"))}
