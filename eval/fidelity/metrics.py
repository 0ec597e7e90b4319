"""Figures of a candidate against its source: perplexity, bits per byte, KL, top-1, by category of text.

KL is KL(source || candidate) in nats over the whole vocabulary at every scored position, largest where the candidate
lacks tokens that the source finds likely; the reverse is largest where the candidate finds tokens likely that the
source would hardly ever choose. Intervals are 95 % percentile-bootstrap intervals: whole samples are drawn with
replacement, since the tokens of one text depend on each other. They describe one candidate from two texts on, and are
too narrow with few; what decides between candidates is the bootstrap-t of paired.py.

The top-level figures, which gates and tables read, are those of the short texts; `long` has the same of the long ones.
A set with only one kind has no `long`.

The position of a scored token is its index in its text, counted from 0, so a token at position t is predicted from the
t tokens before it. The first token of a text is predicted from nothing and is not scored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .figures import (
    Band,
    BitsPerByte,
    Fidelity,
    Figures,
    HeldOutSet,
    Interval,
    Kl,
    KvCache,
    LayerFigures,
    MeanKl,
    OnCard,
    PartFigures,
    Perplexity,
    Router,
    TextFigures,
)  # fmt: skip

RESAMPLES, SEED = 1000, 0
INTERVAL = (0.025, 0.975)
# Name and first position of each band.
BANDS = (("first 256", 0), ("256 to 1k", 256), ("1k to 4k", 1024), ("beyond 4k", 4096))


@dataclass(frozen=True)
class Text:
    """One held-out sequence.

    Attributes:
        tokens: (T,) int64.
        category: e.g. code/rust; `long`: whether it counts as a long text; `place`: of its row in the set.
        scored_bytes: UTF-8 bytes of the tokens that are predicted, all but the first.
    """

    tokens: torch.Tensor
    category: str
    scored_bytes: int
    long: bool = False
    place: str = ""


@dataclass(frozen=True)
class Measured:
    """One candidate against the source, at every scored position (N of them).

    Attributes:
        source_nll, candidate_nll: (N,) float64, −log p of the next token, nats.
        kl, reverse_kl: (N,) float64, KL(source || candidate) and KL(candidate || source), nats.
        same_top1: (N,) bool, whether both models find the same token most likely.
        layers: figures of each layer, see `comparison.compare`.
        as_served, kv_cache: figures of the modules with these names.
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    reverse_kl: np.ndarray
    same_top1: np.ndarray
    layers: Sequence[LayerFigures]
    as_served: Mapping[str, OnCard] = field(default_factory=dict)
    kv_cache: KvCache | None = None


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


def figures(measured: Measured, texts: Sequence[Text], evaluated_on: HeldOutSet) -> Fidelity:
    """All figures of a candidate on the held-out set that the texts are of.

    They are of the short texts, or of all if they are of one kind; `positions` are of the separate long texts or else
    of all. Raises an OverflowError if a loss is not finite, or so large that its perplexity is infinite.
    """
    columns = np.stack(  # (5, N) float64
        [measured.source_nll, measured.candidate_nll, measured.kl, measured.reverse_kl, measured.same_top1]
    )
    if not np.isfinite(columns).all():
        raise OverflowError("a loss is not finite")
    top, long = _scored(texts, columns)
    values = [columns for _, columns in long or top]
    weights = [layer.weight_error for layer in measured.layers if layer.weight_error]
    return Fidelity(
        **_part(top, measured.layers).given(),
        evaluated_on=evaluated_on,
        long=_part(long, [layer.long for layer in measured.layers if layer.long]) if long else None,
        positions=by_position(np.array([columns.shape[1] for columns in values]), np.concatenate(values, axis=1)),
        weight_error=weights or None,
        as_served=dict(measured.as_served) or None,
        kv_cache=measured.kv_cache,
    )


# With its source_nll, candidate_nll, kl, reverse_kl and same_top1 (5, positions) float64.
Scored = tuple[Text, np.ndarray]


def _scored(texts: Sequence[Text], columns: np.ndarray) -> tuple[list[Scored], list[Scored]]:
    """The `parts` of texts, from their columns (5, N)."""
    ends = np.cumsum([len(text.tokens) - 1 for text in texts])
    scored = list(zip(texts, np.split(columns, ends[:-1], axis=1), strict=True))
    top, long = ([scored[i] for i in numbers] for numbers in parts(texts))
    return top, long


def _part(scored: Sequence[Scored], layers: Sequence[LayerFigures]) -> PartFigures:
    """All figures over these texts; `layers` were compared over the same texts."""
    agreement = [layer.agreement for layer in layers]
    per_text = [_of_text(text, columns[2]) for text, columns in scored]
    by_category, by_family = (
        {name: _table([scored[i] for i in members]) for name, members in group.items()}
        for group in groups([text.category for text, _ in scored]).values()
    )
    return PartFigures(
        **_table(scored).given(),
        longest=max(len(text.tokens) for text, _ in scored),
        router=Router(agreement=agreement, min=min(share for share in agreement if share is not None)),
        hidden_error=[layer.hidden_error for layer in layers],
        categories=by_category,
        families=by_family,
        worst=per_text[int(np.argmax([columns[2].mean() for _, columns in scored]))],
        per_text=per_text,
    )


def _of_text(text: Text, kl: np.ndarray) -> TextFigures:
    """The figures of one text, from the KL (T - 1,) at its scored positions."""
    worst = int(kl.argmax())
    return TextFigures(
        place=text.place,
        category=text.category,
        tokens=len(kl),
        kl=float(kl.mean()),
        max=float(kl[worst]),
        position=worst + 1,
    )


def table(texts: Sequence[Text], columns: np.ndarray) -> Figures:
    """Figures over the texts of the top level alone, from the columns (5, N) of all texts, see `Scored`."""
    return _table(_scored(texts, columns)[0])


def _table(scored: Sequence[Scored]) -> Figures:
    source, candidate, kl, reverse, same = np.concatenate([columns for _, columns in scored], axis=1)
    bits = math.log(2) * float(sum(text.scored_bytes for text, _ in scored))
    lengths = np.array([columns.shape[1] for _, columns in scored])
    of_source, of_candidate = (float(nll.sum()) / bits if bits else None for nll in (source, candidate))
    return Figures(
        samples=len(scored),
        tokens=len(kl),
        perplexity=_perplexity(source, candidate),
        bits_per_byte=BitsPerByte(source=of_source, candidate=of_candidate),
        kl=spread(kl),
        reverse_kl=spread(reverse),
        top1=float(same.mean()),
        interval=_intervals(lengths, np.stack([kl, same, candidate - source])),
    )


def spread(kl: np.ndarray) -> Kl:
    """The mean of some values (N,), and how far they reach."""
    return Kl(
        mean=float(kl.mean()),
        median=float(np.median(kl)),
        p99=float(np.quantile(kl, 0.99)),
        p999=float(np.quantile(kl, 0.999)),
        max=float(kl.max()),
    )


def _perplexity(source_nll: np.ndarray, candidate_nll: np.ndarray) -> Perplexity:
    source, candidate = (math.exp(nll.mean()) for nll in (source_nll, candidate_nll))
    return Perplexity(source=source, candidate=candidate, increase=candidate / source - 1)


def _intervals(lengths: np.ndarray, values: np.ndarray) -> Interval | None:
    """Bootstrap intervals of mean KL, top-1 and the increase of perplexity, the rows of `values`, over samples."""
    if len(lengths) < 2:
        return None
    sums = np.add.reduceat(values, np.cumsum(lengths) - lengths, axis=1)  # (3, samples)
    drawn = np.random.default_rng(SEED).integers(len(lengths), size=(RESAMPLES, len(lengths)))
    means = sums[:, drawn].sum(-1) / lengths[drawn].sum(-1)  # (3, resamples)
    means[2] = np.expm1(means[2])
    kl, top1, increase = np.quantile(means, INTERVAL, axis=1).T.tolist()
    return Interval(kl=kl, top1=top1, increase=increase)


def by_position(lengths: np.ndarray, columns: np.ndarray) -> list[Band]:
    """The figures of each band of positions that has tokens.

    `lengths` (texts,) are the scored tokens of each, and the columns (5, sum of lengths) as in `Scored`.
    """
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    ends = [start for _, start in BANDS[1:]] + [None]
    rows = []
    for (name, start), end in zip(BANDS, ends, strict=True):
        inside = (position >= start) & (position < (end or np.inf))
        if not inside.any():
            continue
        source, candidate, kl, reverse, same = (column[inside] for column in columns)
        rows.append(
            Band(
                name=name,
                start=start,
                to=end,
                samples=int((lengths >= max(start, 1)).sum()),
                tokens=int(inside.sum()),
                perplexity=_perplexity(source, candidate),
                kl=MeanKl(mean=float(kl.mean())),
                reverse_kl=MeanKl(mean=float(reverse.mean())),
                top1=float(same.mean()),
            )
        )
    return rows
