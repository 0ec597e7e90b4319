"""Figures of a candidate against its source: perplexity, bits per byte, KL, top-1, by category of text.

KL is KL(source || candidate) in nats over the whole vocabulary at every scored position. Intervals are
95 % bootstrap intervals: whole samples are drawn with replacement, since tokens of one text depend on
each other; where a category has one sample there is none. lockstep.py runs the models.

Long texts are a part of their own: the figures at the top, which gates and tables read, are those of the
short texts, and `long` has the same ones of the long texts. A set that has only one kind has no parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .by_position import by_position

RESAMPLES, SEED, INTERVAL = 1000, 0, (0.025, 0.975)


@dataclass(frozen=True)
class Text:
    """One held-out sequence.

    Attributes:
        tokens: (T,) int64.
        category: e.g. code/rust.
        scored_bytes: UTF-8 bytes of the tokens that are predicted, all but the first.
        long: whether it belongs to the long part.
    """

    tokens: torch.Tensor
    category: str
    scored_bytes: int
    long: bool = False


@dataclass
class Measured:
    """One candidate against the source, at every scored position (N of them).

    Attributes:
        source_nll, candidate_nll: (N,) float64, −log p of the token that follows, nats.
        kl: (N,) float64, nats.
        same_top1: (N,) bool.
        lengths: scored positions of each sequence.
        router_agreement: per layer, the share of the source's choices that the candidate makes too; of
            long texts see below.
        hidden_error: per layer, ‖h_candidate − h_source‖ / ‖h_source‖ over the same tokens.
        weight_error: per layer, relative error of experts and attention; empty where not asked for.
        long_router_agreement, long_hidden_error: the same of the long part; empty where there is none.
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    same_top1: np.ndarray
    lengths: list[int]
    router_agreement: list[float]
    hidden_error: list[float]
    weight_error: list[dict[str, float]] = field(default_factory=list)
    long_router_agreement: list[float] = field(default_factory=list)
    long_hidden_error: list[float] = field(default_factory=list)


def parts(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Which texts the figures at the top are over, and which are the long part beside them, by their numbers.

    Where all texts are long they are all there is, so they stand at the top.
    """
    short, long = ([i for i, text in enumerate(texts) if text.long is kind] for kind in (False, True))
    return (short, long) if short else (long, [])


def figures(measured: Measured, texts: Sequence[Text]) -> dict[str, Any]:
    """The numbers of report.json: of the short texts, of the long ones, by category and by position.

    Returns:
        perplexity {source, candidate, increase (relative)}, bits_per_byte (None where the scored tokens, special
        ones, have no bytes), kl {mean, median, p99, max},
        top1, interval {kl, top1, increase} (None with one sample), tokens, samples, longest (tokens of the
        longest text), router {agreement per layer, min}, hidden_error per layer, categories, families
        (`code` for `code/rust` and its like); long, with the same keys, where there are long texts beside
        short ones; positions, see `by_position`, of the long texts where there are such, else of all; and
        weight_error where it was asked for.

    Raises:
        OverflowError: a loss is not finite, or so large that its perplexity is not.
    """
    if not all(np.isfinite(values).all() for values in (measured.source_nll, measured.candidate_nll, measured.kl)):
        raise OverflowError("a loss is not finite")
    top, long = parts(texts)
    report = _part(measured, texts, top, measured.router_agreement, measured.hidden_error)
    if long:
        report["long"] = _part(measured, texts, long, measured.long_router_agreement, measured.long_hidden_error)
    lengths = np.array(measured.lengths)
    mask = np.repeat(np.isin(np.arange(len(texts)), long or top), lengths)
    columns = (measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask], measured.same_top1[mask])
    report["positions"] = by_position(lengths[long or top], *columns)
    return report | ({"weight_error": measured.weight_error} if measured.weight_error else {})


def _part(
    measured: Measured, texts: Sequence[Text], numbers: Sequence[int], agreement: list[float], hidden: list[float]
) -> dict[str, Any]:
    """All figures over the texts of these numbers."""
    sizes = np.array([text.scored_bytes for text in texts])
    names = {i: texts[i].category for i in numbers}
    above = {i: name.partition("/")[0] for i, name in names.items()}

    def table(members: Iterable[int]) -> dict[str, Any]:
        return _table(measured, np.isin(np.arange(len(texts)), list(members)), sizes)

    def by(group: dict[int, str]) -> dict[str, Any]:
        return {name: table(i for i in numbers if group[i] == name) for name in sorted(set(group.values()))}

    return table(numbers) | {
        "longest": max(len(texts[i].tokens) for i in numbers),
        "router": {"agreement": agreement, "min": min(agreement)},
        "hidden_error": hidden,
        "categories": by(names),
        "families": by(above),
    }


def _table(measured: Measured, members: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    """Figures over the samples (N,) bool that are members."""
    lengths = np.array(measured.lengths)
    mask = np.repeat(members, lengths)
    source, candidate, kl = measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask]
    same = measured.same_top1[mask]
    perplexity = [math.exp(nll.mean()) for nll in (source, candidate)]
    bits = math.log(2) * float(sizes[members].sum())
    return {
        "samples": int(members.sum()),
        "tokens": int(mask.sum()),
        "perplexity": {
            "source": perplexity[0],
            "candidate": perplexity[1],
            "increase": perplexity[1] / perplexity[0] - 1,
        },
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
