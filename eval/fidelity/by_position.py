"""Figures by position: what a context of this length does to a candidate, over the same texts.

The position of a scored token is its index in its text, from 0, so a token at position t is predicted
from the t tokens before it. The first token of a text is predicted from nothing and not scored.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Names, and the first position that belongs to each.
BANDS = (("first 256", 0), ("256 to 1k", 256), ("1k to 4k", 1024), ("beyond 4k", 4096))


def by_position(
    lengths: np.ndarray, source_nll: np.ndarray, candidate_nll: np.ndarray, kl: np.ndarray, same_top1: np.ndarray
) -> list[dict[str, Any]]:
    """A row for each band of positions that has tokens.

    Args:
        lengths: (texts,), scored tokens of each.
        source_nll, candidate_nll, kl, same_top1: (sum of lengths,), see `perplexity.Measured`.

    Returns:
        name, from and to (None: without end), samples (texts that reach so far), tokens, perplexity
        {source, candidate, increase}, kl {mean} and top1.
    """
    position = np.concatenate([np.arange(1, length + 1) for length in lengths])
    ends = [start for _, start in BANDS[1:]] + [None]
    rows = []
    for (name, start), end in zip(BANDS, ends, strict=True):
        here = (position >= start) & (position < (end or np.inf))
        if not here.any():
            continue
        source, candidate = (float(np.exp(nll[here].mean())) for nll in (source_nll, candidate_nll))
        rows.append(
            {
                "name": name,
                "from": start,
                "to": end,
                "samples": int((lengths >= max(start, 1)).sum()),
                "tokens": int(here.sum()),
                "perplexity": {"source": source, "candidate": candidate, "increase": candidate / source - 1},
                "kl": {"mean": float(kl[here].mean())},
                "top1": float(same_top1[here].mean()),
            }
        )
    return rows
