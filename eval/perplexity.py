"""Source and candidates layer by layer in lock-step: perplexity, bits per byte, KL, top-1, routing.

Each model keeps hidden states of its own for every sequence. Layer by layer the source's weights are
materialised, run over all sequences and freed, then each candidate's; so one layer is in memory at a
time, and the source is computed once however many candidates there are. KL is KL(source || candidate)
in nats over the whole vocabulary at every scored position; logits are made in chunks of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantizers.layers import LayeredModel
from quantizers.states import Rows

CHUNK = 256  # positions whose logits exist at a time: 0.2 GB at 200,064 words


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
    """

    source_nll: np.ndarray
    candidate_nll: np.ndarray
    kl: np.ndarray
    same_top1: np.ndarray
    lengths: list[int]
    router_agreement: list[float]
    hidden_error: list[float]


def evaluate(
    source: LayeredModel,
    candidates: Sequence[LayeredModel],
    texts: Sequence[Text],
    work: Path,
    step: Callable[[str], None] = lambda _: None,
) -> list[Measured]:
    """Run all models over the texts.

    Args:
        source, candidates: models of one architecture and vocabulary.
        texts: at least one, of two tokens or more.
        work: an empty folder for the hidden states.
        step: called after each layer of each model, and each scored sequence.
    """
    models = [source, *candidates]
    lengths = [len(text.tokens) for text in texts]
    states: list[Rows] = []
    for number, model in enumerate(models):
        table = model.embedding()
        rows = Rows(work / f"states-{number}.bin", lengths, model.sizes["hidden"], model.dtype)
        for i, text in enumerate(texts):
            rows[i] = table[text.tokens.to(table.device)]
        states.append(rows)
        del table
    agreement: list[list[float]] = [[] for _ in candidates]
    errors: list[list[float]] = [[] for _ in candidates]
    for number in range(source.sizes["layers"]):
        reference = _run_layer(source, number, states[0])
        step(f"layer {number}, source")
        for c, candidate in enumerate(candidates):
            chosen = _run_layer(candidate, number, states[c + 1])
            agreement[c].append(_agreement(reference, chosen))
            errors[c].append(_relative_error(states[0], states[c + 1]))
            step(f"layer {number}, candidate {c + 1}")
    scores = _score(models, states, texts, step)
    for rows in states:
        rows.path.unlink()
    return [
        Measured(scores[0].nll, score.nll, score.kl, score.same, [n - 1 for n in lengths], a, e)
        for score, a, e in zip(scores[1:], agreement, errors, strict=True)
    ]


def _run_layer(model: LayeredModel, number: int, states: Rows) -> list[torch.Tensor]:
    choices = []
    with model.layer(number) as layer:
        for i in range(len(states)):
            output, chosen = model.run(layer, states[i])
            states[i] = output
            choices.append(chosen.cpu())
    return choices


def _agreement(reference: list[torch.Tensor], chosen: list[torch.Tensor]) -> float:
    same = sum(int((a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).sum()) for a, b in zip(reference, chosen, strict=True))
    return same / sum(a.numel() for a in reference)


def _relative_error(reference: Rows, states: Rows) -> float:
    difference = sum(
        float((a.float() - b.float()).double().square().sum()) for a, b in zip(reference, states, strict=True)
    )
    return math.sqrt(difference / sum(float(a.double().square().sum()) for a in reference))


@dataclass
class _Scores:
    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


def _score(
    models: Sequence[LayeredModel], states: Sequence[Rows], texts: Sequence[Text], step: Callable[[str], None]
) -> list[_Scores]:
    heads = [model.head() for model in models]
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in models]
    for i, text in enumerate(texts):
        targets = text.tokens[1:].to(models[0].device)
        final = [model.final(rows[i][:-1]) for model, rows in zip(models, states, strict=True)]
        for start in range(0, len(targets), CHUNK):
            wanted = targets[start : start + CHUNK, None]
            logs = [
                torch.log_softmax((x[start : start + CHUNK] @ head.T).float(), dim=-1)
                for x, head in zip(final, heads, strict=True)
            ]
            p, best = logs[0].exp(), logs[0].argmax(-1)
            for m, q in enumerate(logs):
                nll = -q.gather(1, wanted)[:, 0]
                # A source equal to itself gives exactly 0: the difference of equal logarithms is 0.
                kl = (p * (logs[0] - q)).sum(-1, dtype=torch.float64)
                same = q.argmax(-1) == best
                parts[m].append((nll.double().cpu().numpy(), kl.cpu().numpy(), same.cpu().numpy()))
        step(f"scored {i + 1} of {len(texts)}")
    return [_Scores(*(np.concatenate(column) for column in zip(*part, strict=True))) for part in parts]


def figures(measured: Measured, texts: Sequence[Text]) -> dict[str, Any]:
    """The numbers of report.json: over all positions, and by category.

    Returns:
        perplexity {source, candidate, increase (relative)}, bits_per_byte, kl {mean, median, p99, max},
        top1, router {agreement per layer, min}, hidden_error per layer, categories, tokens, samples.
    """
    sequence = np.repeat(np.arange(len(texts)), measured.lengths)
    names = sorted({text.category for text in texts})
    whole = _table(measured, np.ones(len(measured.kl), dtype=bool), sum(t.scored_bytes for t in texts))
    categories = {}
    for name in names:
        members = np.array([text.category == name for text in texts])
        size = sum(t.scored_bytes for t in texts if t.category == name)
        categories[name] = _table(measured, members[sequence], size) | {"samples": int(members.sum())}
    return whole | {
        "samples": len(texts),
        "router": {"agreement": measured.router_agreement, "min": min(measured.router_agreement)},
        "hidden_error": measured.hidden_error,
        "categories": categories,
    }


def _table(measured: Measured, mask: np.ndarray, size: int) -> dict[str, Any]:
    source, candidate, kl = measured.source_nll[mask], measured.candidate_nll[mask], measured.kl[mask]
    perplexity = [float(np.exp(nll.mean())) for nll in (source, candidate)]
    return {
        "tokens": int(mask.sum()),
        "perplexity": {
            "source": perplexity[0],
            "candidate": perplexity[1],
            "increase": perplexity[1] / perplexity[0] - 1,
        },
        "bits_per_byte": {
            "source": float(source.sum() / math.log(2) / size),
            "candidate": float(candidate.sum() / math.log(2) / size),
        },
        "kl": {
            "mean": float(kl.mean()),
            "median": float(np.median(kl)),
            "p99": float(np.quantile(kl, 0.99)),
            "max": float(kl.max()),
        },
        "top1": float(measured.same_top1[mask].mean()),
    }
