"""Saliency of a model's routed experts: REAP scores, their tables, and lists that other programs read.

The score of an expert is the mean, over the tokens routed to it, of its routing weight times the L2 norm of its output
before that is weighted (Router-weighted Expert Activation Pruning, arXiv 2510.13999); without tokens it is 0. Scores of
one layer can be compared; norms differ from layer to layer. Nothing is pruned here.

Legend: L layers with experts, C categories, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from quantizers.eval.coverage.figures import (
    CategorySaliency,
    CoverageReport,
    LayerSaliency,
    LeastSalientExpert,
    LeastShares,
    Saliency,
)
from quantizers.eval.coverage.routing import Routed
from quantizers.eval.coverage.summary import WORST, helpful, least, named, pairs
from quantizers.system.formatting import text_table

PARTS = {"quarter": 0.25, "half": 0.5}  # of a layer's experts, those that score least


def saliency(routed: Routed, blocks: Sequence[str]) -> Saliency:
    """The scores over all texts and by category.

    `routed` has `weighted_norms`; `blocks` are, of each layer with experts, the names of transformers' modules that
    hold its router and experts.
    """
    assert routed.weighted_norms is not None, "the norms were asked for"
    sums, counts = routed.weighted_norms, routed.counts
    scores, by_category = _means(sums.sum(1), counts.sum(1)), _means(sums, counts)  # (L, E), (L, C, E)
    ranks = scores.argsort(-1, kind="stable").argsort(-1)
    of_mean, of_mean_there = _relative_to_mean(scores), _relative_to_mean(by_category)
    below = {name: ranks < int(share * scores.shape[1]) for name, share in PARTS.items()}  # as REAP prunes

    def lost(category: int, chosen: np.ndarray) -> float:
        """The share of a category's weighted norms that comes from the chosen experts, (L, E) bool."""
        whole = sums[:, category].sum()
        return float(sums[:, category][chosen].sum() / whole) if whole else 0.0

    def category_saliency(category: int) -> CategorySaliency:
        return CategorySaliency(
            without_tokens=int((counts[:, category] == 0).sum()),
            in_least=LeastShares(quarter=lost(category, below["quarter"]), half=lost(category, below["half"])),
            scores=by_category[:, category].tolist(),
        )

    return Saliency(
        without_tokens=pairs(counts.sum(1) == 0, routed.layers),
        least=[
            LeastSalientExpert(
                layer=routed.layers[layer],
                expert=expert,
                score=float(scores[layer, expert]),
                of_mean=float(of_mean[layer, expert]),
                tokens=int(counts[layer, :, expert].sum()),
                most_in=helpful(of_mean_there[layer, :, expert], routed.categories),
            )
            for layer, expert in least(of_mean)
        ],
        per_layer=[
            LayerSaliency(layer=number, block=block, scores=row.tolist())
            for number, block, row in zip(routed.layers, blocks, scores, strict=True)
        ],
        by_category={name: category_saliency(number) for number, name in enumerate(routed.categories)},
    )


def _means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    means: np.ndarray = sums / np.maximum(counts, 1)
    return means


def _relative_to_mean(scores: np.ndarray) -> np.ndarray:
    """Scores (…, E) divided by the mean of their experts; 0 where all are 0."""
    mean = scores.mean(-1, keepdims=True)
    return np.where(mean > 0, scores / np.where(mean > 0, mean, 1), 0)


def saliency_table(figures: Saliency) -> str:
    """Text that `quantize coverage --saliency` adds to the tables of coverage."""
    experts = [
        (
            row.layer, row.expert, f"{row.score:.4g}", f"{row.of_mean:.1%}", f"{row.tokens:,}",
            ", ".join(f"{name} {there:.0%}" for name, there in row.most_in.items()),
        )
        for row in figures.least
    ]  # fmt: skip
    rows = sorted(figures.by_category.items(), key=lambda named_row: -named_row[1].in_least.quarter)
    categories = [
        (name, f"{row.without_tokens:,}", f"{row.in_least.quarter:.1%}", f"{row.in_least.half:.1%}")
        for name, row in rows[:WORST]
    ]
    more = f"; {len(rows) - WORST} more with --json" if len(rows) > WORST else ""
    silent = figures.without_tokens
    return "\n\n".join(
        [
            "Saliency (REAP): routing weight times norm of the output, mean over an expert's tokens. The experts with "
            "the least, relative to the mean of their layer, and where they have most:",
            text_table(("layer", "expert", "score", "of mean", "tokens", "of the mean in the category"), experts),
            "What pruning would take from a category: the share of its weighted norms that comes from the experts "
            f"which score least over all texts{more}",
            text_table(("category", "experts without tokens", "least quarter", "least half"), categories),
            f"experts without tokens, which score 0: {len(silent):,}" + (f" ({named(silent)})" if silent else ""),
        ]
    )


def lists(report: CoverageReport, saliency: Saliency) -> dict[str, str]:
    """Files with the numbers of each layer's experts in an order, by name.

    Of what `quantize coverage --saliency --json` prints. most-salient-first.jsonl: a line `{"layer": [experts]}` for
    each layer, as vllm-ascend's `expert_list_file` is read: `expert_prune_ratio` keeps the first ones of each.
    hottest-first.jsonl: likewise by routed tokens. least-salient-first.json: by the names of the modules that the
    report of llm-compressor's REAPPruningModifier has too.
    """
    rows = saliency.per_layer
    ascending = [np.argsort(row.scores, kind="stable") for row in rows]
    tokens = (np.array(row.routed_tokens) for row in report.per_layer)
    numbers = [row.layer for row in rows]
    by_block = {row.block: order.tolist() for row, order in zip(rows, ascending, strict=True)}
    return {
        "most-salient-first.jsonl": _lines(numbers, (order[::-1] for order in ascending)),
        "hottest-first.jsonl": _lines(numbers, (np.argsort(-counts, kind="stable") for counts in tokens)),
        "least-salient-first.json": json.dumps(by_block) + "\n",
    }


def _lines(numbers: Iterable[int], orders: Iterable[np.ndarray]) -> str:
    return "".join(f"{json.dumps({str(n): order.tolist()})}\n" for n, order in zip(numbers, orders, strict=True))
