"""Figures by position in the text: how a candidate's error depends on the length of the context.

The position of a scored token is its index in its text, counted from 0, so a token at position t is predicted
from the t tokens before it. The first token of a text is predicted from nothing and is not scored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Name and first position of each band.
BANDS = (("first 256", 0), ("256 to 1k", 256), ("1k to 4k", 1024), ("beyond 4k", 4096))


def by_position(
    lengths: np.ndarray, source_nll: np.ndarray, candidate_nll: np.ndarray, kl: np.ndarray, same_top1: np.ndarray
) -> list[dict[str, Any]]:
    """A row for each band of positions that has tokens.

    Args:
        lengths: (texts,), scored tokens of each.
        source_nll, candidate_nll, kl, same_top1: (sum of lengths,), see `figures.Measured`.

    Returns:
        name, from and to (None: no end), samples (texts that reach this band), tokens, perplexity
        {source, candidate, increase}, kl {mean} and top1.
    """
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    ends = [start for _, start in BANDS[1:]] + [None]
    rows = []
    for (name, start), end in zip(BANDS, ends, strict=True):
        in_band = (position >= start) & (position < (end or np.inf))
        if not in_band.any():
            continue
        source, candidate = (float(np.exp(nll[in_band].mean())) for nll in (source_nll, candidate_nll))
        rows.append(
            {
                "name": name,
                "from": start,
                "to": end,
                "samples": int((lengths >= max(start, 1)).sum()),
                "tokens": int(in_band.sum()),
                "perplexity": {"source": source, "candidate": candidate, "increase": candidate / source - 1},
                "kl": {"mean": float(kl[in_band].mean())},
                "top1": float(same_top1[in_band].mean()),
            }
        )
    return rows
