"""Results of `quantize compare` and `quantize calibration why` as they could be, with invented numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.coverage.compare import compare_counts
from eval.coverage.routing import Routed
from quantizers.recipe.schema import CoverageGate

CATEGORIES = (
    *(f"code/{name}" for name in ("c++", "go", "java", "python", "rust", "typescript")),
    *(f"spoken/{name}" for name in ("french", "german", "hindi", "thai")),
    *("math/proofs", "agents/shell"),
)
TEXTS = 12  # of a category; of the last one fewer than an interval needs


def set_comparison(labels: Sequence[str] = ("old", "new"), layers: int = 4, experts: int = 8) -> dict[str, Any]:
    """Of sets, each 2 % closer than the one before, but worse in Rust; and no interval for the last category."""
    rng = np.random.default_rng(5)
    sets = [_one_set(label, 0.98**n, layers, rng) for n, label in enumerate(labels)]
    numbers = range(len(labels))
    load = rng.gamma(0.6, 1, (layers, len(CATEGORIES), experts))
    routed = [_routed(load * rng.gamma(4, 1, load.shape), rng) for _ in labels]
    return _top(layers) | {
        "looks": 1,
        "error": 0.05,
        "sets": sets,
        "pairs": [_pair(sets[a], sets[b], routed[a], routed[b]) for a in numbers for b in numbers if a < b],
    }


def source_effects(sources: Sequence[str] = ("rust code", "german chat", "proofs", "poems")) -> dict[str, Any]:
    """Of a set, the first of whose sources helps, the next to last hurts, and the last is too small to tell."""
    rng = np.random.default_rng(6)
    changes = np.sort(rng.normal(0, 0.004, len(sources)))[::-1] + np.eye(len(sources))[0] * 0.03
    changes[-2] = changes[-1] = changes.min() - 0.01
    rows = []
    for n, (name, change) in enumerate(zip(sources, changes.tolist(), strict=True)):
        said = "helps" if n == 0 else "hurts" if n == len(sources) - 2 else "no difference"
        found = _change(change, 0.3 if said != "no difference" else 2.5)
        if n == len(sources) - 1:
            said, found = "too few texts", _change(change, None)
        about = {"source": name, "texts": [9, 8, 9], "tokens": [3900, 4100, 4000]}
        rows.append(about | found | {"verdict": said, "words": f"{name}: {said}"})
    return _top(4) | {"set": _one_set("old", 1.0, 4, rng), "sources": rows}


def _top(layers: int) -> dict[str, Any]:
    return {
        "model": "tiny/minimax-m2",
        "evaluated_on": {"name": "held-out", "digest": "ab" * 32, "past_the_model": {"texts": 0}},
        "solved_layers": min(layers, 8),
        "layers": layers,
        "draws": 3,
        "tokens": 120_000,
        "notes": ["The text of the note."],
    }


def _one_set(label: str, factor: float, layers: int, rng: np.random.Generator) -> dict[str, Any]:
    draws = (0.041 * factor * (1 + 0.004 * rng.standard_normal(3))).tolist()
    errors = 0.02 * factor * (1 + np.arange(layers)) ** 0.5 * (1 + 0.03 * rng.standard_normal((3, layers)))

    def of(mean: float, spread: float = 0.1) -> dict[str, Any]:
        return {"mean": mean, "interval": [mean * (1 - spread), mean * (1 + spread)]}

    def field(name: str, kind: str, texts: int) -> dict[str, Any]:
        worse = 1.12 if name == "code/rust" and factor < 1 else 1.0
        mean = factor * worse * (0.02 + 0.003 * len(name)) * (1 + 0.01 * float(rng.standard_normal()))
        kl = of(mean, 0.2) if texts == TEXTS else {"mean": mean, "interval": None}
        return {"kind": kind, "texts": texts, "tokens": 400 * texts, "kl": kl}

    families = sorted({name.partition("/")[0] for name in CATEGORIES})
    kinds = [(name, "family", TEXTS) for name in families] + [(name, "category", TEXTS) for name in CATEGORIES[:-1]]
    kinds += [(CATEGORIES[-1], "category", 3), ("long texts", "long", TEXTS)]
    return {
        "label": label,
        "name": label,
        "file": f"{label}.yaml",
        "draws": 3,
        "samples": [290, 300, 310],
        "tokens": [119_800, 119_950, 120_000],
        "kl": of(float(np.mean(draws))) | {"per_draw": draws},
        "top1": of(0.93, 0.01),
        "perplexity": {"source": 5.1, "candidate": 5.2, "increase": 0.02, "interval": [0.015, 0.024]},
        "router": of(0.88, 0.01),
        "hidden_error": [
            {"mean": float(row.mean()), "low": float(row.min()), "high": float(row.max())} for row in errors.T
        ],
        "fields": {name: field(name, kind, texts) for name, kind, texts in kinds},
    }


def _change(change: float, spread: float | None) -> dict[str, Any]:
    """`spread` is the interval's half width relative to the change; above 1 it holds 0."""
    if spread is None:
        return {"change": change, "interval": None, "p": None, "adjusted": None}
    half = abs(change) * spread
    p = 0.2 if spread > 1 else 0.001
    return {"change": change, "interval": [change - half, change + half], "p": p, "adjusted": min(1.0, 4 * p)}


def _verdict(change: dict[str, Any]) -> str:
    if change["interval"] is None:
        return "too few texts"
    low, high = change["interval"]
    return "better" if high < 0 else "worse" if low > 0 else "no difference"


def _pair(first: dict[str, Any], other: dict[str, Any], before: Routed, after: Routed) -> dict[str, Any]:
    whole = _change(other["kl"]["mean"] / first["kl"]["mean"] - 1, 0.5)
    fields = []
    for name, row in first["fields"].items():
        a, b = row["kl"]["mean"], other["fields"][name]["kl"]["mean"]
        change = _change(b / a - 1, (0.4 if "rust" in name else 1.3) if row["kl"]["interval"] else None)
        about = {"name": name, "kind": row["kind"], "texts": row["texts"], "first": a, "other": b}
        fields.append(about | change | {"verdict": _verdict(change)})
    routing = compare_counts(
        before, after, CoverageGate(min_routed_tokens=int(0.4 * before.counts.sum() / before.counts[:, 0].size))
    )
    for side, one in (("before", first), ("after", other)):
        routing[side]["label"] = one["label"]
    verdict = _verdict(whole)
    return (
        {"first": first["label"], "other": other["label"]}
        | whole
        | {
            "detectable": 0.012,
            "verdict": verdict,
            "words": f"{other['label']} is {verdict} than {first['label']}: KL {whole['change']:+.1%}.",
            "fields": fields,
            "routing": routing,
        }
    )


def _routed(load: np.ndarray, rng: np.random.Generator) -> Routed:
    """Of a set, with a load (L, C, E) of the experts; each token chooses two."""
    tokens = rng.integers(5_000, 20_000, len(CATEGORIES))
    shares = load / load.sum(2, keepdims=True)
    counts = (2 * tokens[None, :, None] * shares).astype(np.int64)
    return Routed(CATEGORIES, tokens, tuple(range(len(load))), counts, np.zeros_like(counts), counts)
