"""Results of `quantize compare` and `quantize calibration why`, of invented measurements."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quantizers.eval.coverage.routing import Routed
from quantizers.eval.fidelity.metrics import Text
from quantizers.recipe.schema import CoverageGate
from quantizers.sets.figures import MeasuredSet, Scored, comparison, set_figures, source_effects

CATEGORIES = (
    *(f"code/{name}" for name in ("c++", "go", "java", "python", "rust", "typescript")),
    *(f"spoken/{name}" for name in ("french", "german", "hindi", "thai")),
    *("math/proofs", "agents/shell"),
)
DRAWS, TEXTS = 3, 10  # texts of a category; of the last one fewer than an interval needs


def compared(labels: Sequence[str] = ("old", "new"), layers: int = 4, experts: int = 8) -> dict[str, Any]:
    """Of sets, each 2 % closer than the one before, but all after the first worse in Rust."""
    return copy.deepcopy(_compared(tuple(labels), layers, experts))


@functools.cache
def _compared(labels: tuple[str, ...], layers: int, experts: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    load = rng.gamma(0.6, 1, (layers, len(CATEGORIES), experts))
    sets = [_measured(name, 0.98**n, 1.2 if n else 1.0, load, n) for n, name in enumerate(labels)]
    rule = CoverageGate(min_routed_tokens=int(0.4 * sets[0].routed.counts.sum() / layers / experts))
    return _about(layers) | {"looks": 1, "error": 0.05} | comparison(sets, _scored(), rule)


def explained(sources: Sequence[str] = ("rust code", "german chat", "proofs")) -> dict[str, Any]:
    """Of a set, whose first source helps and last hurts."""
    return copy.deepcopy(_explained(tuple(sources)))


@functools.cache
def _explained(sources: tuple[str, ...]) -> dict[str, Any]:
    load = np.ones((4, len(CATEGORIES), 8))
    factors = [1.04, *[1 + 1e-4 * n for n in range(len(sources) - 2)], 0.97]
    without = [
        _measured(name, factor, 1.0, load, n + 1) for n, (name, factor) in enumerate(zip(sources, factors, strict=True))
    ]
    whole, scored = _measured("old", 1.0, 1.0, load, 0), _scored()
    return _about(4) | {"set": set_figures(whole, scored), "sources": source_effects(whole, without, scored)}


def _about(layers: int) -> dict[str, Any]:
    return {
        "model": "tiny/minimax-m2",
        "evaluated_on": {"name": "held-out", "digest": "ab" * 32, "past_the_model": {"texts": 0, "tokens": 0}},
        "solved_layers": min(layers, 8),
        "layers": layers,
        "draws": DRAWS,
        "tokens": 120_000,
        "texts": _scored().rows,
        "notes": ["The text of the note."],
    }


@functools.cache
def _scored() -> Scored:
    counts = dict.fromkeys(CATEGORIES, TEXTS) | {CATEGORIES[-1]: 3}
    names = [name for name, count in counts.items() for _ in range(count)] + ["math/proofs"] * TEXTS
    texts = [
        Text(torch.zeros(100 + n % 7, dtype=torch.int64), name, 300, n >= sum(counts.values()), f"./texts.jsonl:{n}")
        for n, name in enumerate(names)
    ]
    tokens = np.array([len(text.tokens) for text in texts], dtype=float)
    return Scored(texts, 1.6 * tokens, 8 * tokens)


def _measured(label: str, factor: float, rust: float, load: np.ndarray, seed: int) -> MeasuredSet:
    """A set whose KL is `factor` times as large as usual; `load` (L, C, E) is that of the experts."""
    scored, rng = _scored(), np.random.default_rng(seed)
    size, layers = (DRAWS, len(scored.texts)), len(load)
    of_text = factor * np.array([rust if text.category == "code/rust" else 1.0 for text in scored.texts])
    kl = scored.tokens * 0.04 * of_text * np.random.default_rng(9).gamma(4, 0.25, size[1]) * rng.normal(1, 0.02, size)
    errors = 0.02 * factor * (1 + np.arange(layers)) ** 0.5 * rng.normal(1, 0.03, (DRAWS, layers))
    tokens = rng.integers(5_000, 20_000, len(CATEGORIES))
    load = load * rng.gamma(4, 1, load.shape)
    counts = (2 * tokens[None, :, None] * load / load.sum(2, keepdims=True)).astype(np.int64)
    routed = Routed(CATEGORIES, tokens, tuple(range(layers)), counts, np.zeros_like(counts), np.zeros_like(counts))
    shares = [np.broadcast_to(share * all_, size) for share, all_ in ((0.93, scored.tokens), (0.88, scored.choices))]
    nll = np.broadcast_to(1.01 * scored.nll, size)
    return MeasuredSet(
        label, label, f"{label}.yaml", [290, 300, 310], [119_800, 119_950, 120_000], DRAWS, kl, shares[0], nll,
        shares[1], errors, routed,
    )  # fmt: skip
