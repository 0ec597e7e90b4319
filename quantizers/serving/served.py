"""A server's log-probabilities against our own evaluation of the same tokens: KL as a lower bound, top-1, perplexity.

A server returns the log-probabilities of few tokens at each position. By the log-sum inequality the divergence of two
distributions is at least that of coarser ones: here the returned tokens one by one, and all others as one event.

    KL(p || q) >= sum over the returned ids of p log(p / q)  +  p_rest log(p_rest / q_rest)

`verdict` tells whether a server is healthy by it. A share of the quantization's own KL would be no limit (healthy
servers were at 25 % of it, in bfloat16, to 1,800 %); the distance of the source on the same server is one.

Legend: T tokens of a text, N returned ids, V vocabulary; p ours, q the server's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from quantizers.eval.fidelity.metrics import groups, spread
from quantizers.eval.fidelity.scoring import Models, divergence, log_probabilities

ROWS = 32  # positions whose float64 probabilities are in memory at a time: 50 MB with a vocabulary of 200,064
ROUNDING = 4 * float(np.finfo(np.float32).eps)  # by so much a sum of float32 probabilities, and thus q_rest, is off
EXACT = 1e-6  # mean KL of an exact server, in nats
WITH_TIES = 1e-4  # the same with near ties, in which case the median is below the next
TIES_MEDIAN = 1e-9
TIMES, SHARE = 2.0, 0.1  # the limit: of the source's distance, and of KL(source || candidate)
LEAST = 1e-300  # in place of 0 in a divisor
UNLIKE = 0.2  # below this share of equal most likely tokens the server computes something else
# What `compare_text` finds at a position; nats, shares of 1. Without a source its columns are NaN.
COLUMNS = ("candidate_server", "source_server", "source_candidate", "top1", "outside", "source", "candidate", "server")
KL, PERPLEXITY = COLUMNS[:3], COLUMNS[5:]


def bounded_kl(log_p: torch.Tensor, ids: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lower bound of KL(p || q) in nats, and p_rest: (T,) float64 each.

    q_rest is known to ROUNDING only; of what it may be, the value closest to p_rest is taken, so this stays a bound.

    Args:
        log_p: (T, V) float32, all of ours.
        ids: (T, N) int64, -1 where a row has fewer, but never first.
        log_q: (T, N) float64, the server's of these, -inf at -1.
    """
    there = ids >= 0
    at = torch.where(there, ids, ids[:, :1])
    p = log_p.double().exp()
    total = p.sum(1, keepdim=True)  # 1 but for rounding
    p_ids = p.gather(1, at) / total * there
    p_rest = p.scatter_(1, at, 0.0).sum(1) / total[:, 0]
    log_ratio = torch.where(there, log_p.gather(1, at) - total.log() - log_q, 0.0)
    p_sum, q_sum = p_ids.sum(1), log_q.exp().sum(1)
    q_rest = torch.minimum(torch.maximum(p_rest, 1 - q_sum - ROUNDING), (1 - q_sum + ROUNDING).clamp(min=ROUNDING))
    among = (p_ids * log_ratio).sum(1) - torch.xlogy(p_sum, p_sum / q_sum.clamp(min=LEAST))
    rest = torch.xlogy(p_rest, p_rest / q_rest.clamp(min=LEAST))
    between = torch.xlogy(1 - p_rest, (1 - p_rest) / (1 - q_rest)) + rest
    return (among + between).clamp(min=0), p_rest


@torch.no_grad()
def compare_text(
    models: Models, tokens: torch.Tensor, states: Sequence[torch.Tensor], returned: Sequence[np.ndarray]
) -> np.ndarray:
    """The COLUMNS of a text, (len(COLUMNS), T - 1) float64.

    Args:
        models: the candidate, and the source if there is one, with the head (V, H) of each.
        tokens: (T,) int64; `states`: (T, W) of each model, leaving the last layer.
        returned: by the server: ids (T - 1, N) int64, their log-probabilities float64, and those of the next token.
    """
    ids, logs, following = map(torch.from_numpy, returned)
    tables = []
    for rows, ours in log_probabilities(models, states, ROWS):
        candidate = ours[0]
        nll = [-log_p.gather(1, tokens[1:][rows, None])[:, 0].double() for log_p in ours]
        kl, outside = bounded_kl(candidate, ids[rows], logs[rows])
        likeliest = ids[rows].gather(1, logs[rows].argmax(-1, keepdim=True))[:, 0]
        from_source = [torch.full_like(kl, math.nan)] * 3
        if len(ours) > 1:
            stored = divergence(ours[1], candidate)
            from_source = [bounded_kl(ours[1], ids[rows], logs[rows])[0], stored, nll[1]]
        same = (candidate.argmax(-1) == likeliest).double()
        tables.append(torch.stack([kl, *from_source[:2], same, outside, from_source[2], nll[0], -following[rows]]))
    return torch.cat(tables, dim=1).numpy()


def figures(tables: Sequence[np.ndarray], categories: Sequence[str]) -> dict[str, Any]:
    """Figures over all texts and by their categories, from `compare_text` of each: `ServedFigures` of schema.py."""
    return _row(tables) | {
        kind: {name: _row([tables[i] for i in members]) for name, members in group.items()}
        for kind, group in groups(categories).items()
    }


def _row(tables: Sequence[np.ndarray]) -> dict[str, Any]:
    columns = dict(zip(COLUMNS, np.concatenate(tables, axis=1), strict=True))
    present = {name: values for name, values in columns.items() if not np.isnan(values).any()}
    return {
        "samples": len(tables),
        "tokens": len(columns["top1"]),
        "kl": {name: spread(present[name]).as_dict() for name in KL if name in present},
        "top1": float(columns["top1"].mean()),
        "outside": float(columns["outside"].mean()),
        "perplexity": {name: float(np.exp(min(present[name].mean(), 700.0))) for name in PERPLEXITY if name in present},
    }


def verdict(measured: Mapping[str, Any], *, exact: bool, source_figures: Mapping[str, Any] | None) -> dict[str, Any]:
    """Whether a server's distance is within its limit: `Verdict` of schema.py.

    Args:
        measured: its `figures`.
        exact: whether the server computes in float32 with weights as stored.
        source_figures: those of the source on the same server, over the same tokens; None if it was not served.
    """
    mine = measured["kl"]["candidate_server"]
    distance = mine["mean"]
    limit = None
    remarks = []
    if exact:
        ties = EXACT < distance <= WITH_TIES and mine["median"] < TIES_MEDIAN
        limit = WITH_TIES if ties else EXACT
        if ties:
            remarks.append(
                f"above {EXACT:g}, but the median is {mine['median']:.1e}: a near tie in the router flips single tokens"
            )
    elif source_figures is not None:
        stored = measured["kl"]["source_candidate"]["mean"]
        limit = TIMES * source_figures["kl"]["candidate_server"]["mean"] + SHARE * stored
    passed = limit is None or distance <= limit
    if not passed or measured["top1"] < UNLIKE:
        remarks += reasons(measured)
    kind = "exact" if exact else "none" if limit is None else "as served"
    return {"kind": kind, "distance": distance, "limit": limit, "passed": passed, "said": remarks}


def reasons(measured: Mapping[str, Any]) -> Iterator[str]:
    """Likely reasons for a server's distance from our evaluation, from the figures; the usual reasons come last."""
    kl, perplexity = measured["kl"], measured["perplexity"]
    mine = kl["candidate_server"]
    if measured["top1"] < UNLIKE:
        yield (
            f"its most likely token is ours at {measured['top1']:.1%} of the positions, near chance: another tokenizer "
            "or order of the vocabulary, or another model"
        )
    elif kl.get("source_server", mine)["mean"] < mine["mean"] / 2:
        yield "it is closer to the source than to this checkpoint: it serves the source, or another output of it"
    elif mine["median"] < mine["mean"] / 100:
        yield (
            f"half of the positions are below {mine['median']:.1e}, so few tokens carry it: some experts, or a router "
            "without its bias or compensation"
        )
    else:
        yield (
            f"the median is {mine['median']:.1e}, so most positions are off: a wrong router, other scales, norms or "
            "rotary embedding, or a dtype of less precision"
        )
    if perplexity["server"] > 1.5 * perplexity["candidate"]:
        yield f"its perplexity is {perplexity['server']:.4g}, ours {perplexity['candidate']:.4g}"
    outside = measured["outside"]
    if outside > SHARE:
        yield f"{outside:.0%} of the probability lies outside the returned ids: --top-k is small for this text"
    yield (
        "the usual reasons: a wrong router, other scales, a wrong template, tokenizer or vocabulary, capped "
        "log-probabilities, another model"
    )
