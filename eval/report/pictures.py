"""Draws coverage.png and fidelity.png, which show the tables at a glance. Needs no display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.fidelity.tables import CATEGORY_ROWS
from quantizers.system.atomic import atomic, disk_errors

UNCOVERED = "#d62728"
STYLES = {"-": "hidden states", "--": "experts' weights", ":": "router's other choices"}
TICKS = 16  # layers or experts that get a tick label, at most


def coverage_picture(layers: Sequence[dict[str, Any]], minimum: int, title: str, path: Path) -> None:
    """Draw layers by experts, brighter with the logarithm of the tokens; red with a cross below the minimum.

    Args:
        layers: the layers with experts, each with its number and the `routed_tokens` of its experts.
        minimum: routed tokens that an expert needs to count as covered.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    totals = np.array([row["routed_tokens"] for row in layers])  # (layers, experts)
    experts = totals.shape[1]
    covered = np.ma.masked_less(totals, max(minimum, 1))
    low, high = (int(covered.min()), int(covered.max())) if covered.count() else (1, 10)
    width, height = min(18.0, max(6.0, 0.11 * experts + 3)), min(14.0, max(2.8, 0.2 * len(layers) + 1.6))
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(
        covered, aspect="auto", cmap="viridis", norm=LogNorm(low, max(high, low + 1)), interpolation="nearest"
    )
    axes.set_facecolor(UNCOVERED)  # shows through where cells are masked
    uncovered = np.argwhere(totals < max(minimum, 1))
    if len(uncovered):
        size = 60 if experts <= 32 else 12
        axes.scatter(uncovered[:, 1], uncovered[:, 0], marker="x", s=size, c="white", linewidths=1.2)
        label = f"below {max(minimum, 1):,} tokens: {len(uncovered):,} of {totals.size:,}"
        figure.legend(handles=[Patch(color=UNCOVERED, label=label)], loc="outside lower right", frameon=False)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_xticks(_ticks(experts))
    axes.set_yticks(_ticks(len(layers)), [layers[i]["layer"] for i in _ticks(len(layers))])
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    figure.colorbar(image, ax=axes, label="routed tokens")
    save(figure, path)


def _ticks(count: int) -> list[int]:
    step = max(1, -(-count // TICKS))
    return list(range(0, count, step))


def fidelity_picture(results: Sequence[tuple[str, dict[str, Any]]], path: Path) -> None:
    """Draw mean KL by category, with intervals, and by position; and by depth the errors of states, weights, router.

    Args:
        results: name and figures of each candidate.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    few = len(results[0][1]["categories"]) <= CATEGORY_ROWS
    kind = "categories" if few else "families"
    tables = [one[kind] | ({"long texts": one["long"]} if "long" in one else {}) for _, one in results]
    categories = list(tables[0])
    bands = [row["name"] for row in results[0][1]["positions"]]
    several = len(bands) > 1
    height = max(4.5, 1.5 + len(categories) * (0.1 + 0.09 * len(results)))
    figure = Figure(figsize=(18 if several else 14, min(16.0, height)), layout="constrained", dpi=120)
    panels = figure.subplots(1, 3 if several else 2, width_ratios=(1, 0.8, 1.2) if several else (1, 1.2))
    bars, depth = panels[0], panels[-1]
    band = 0.8 / len(results)
    for i, (_, one) in enumerate(results):
        means = np.array([tables[i][c]["kl"]["mean"] for c in categories])
        intervals = [tables[i][c]["interval"] for c in categories]
        ends = [x["kl"] if x else [m, m] for x, m in zip(intervals, means, strict=True)]
        spread = np.abs(np.array(ends).T - means)  # (2, categories)
        at = np.arange(len(categories)) + (i - (len(results) - 1) / 2) * band
        bars.barh(at, means, height=band * 0.9, xerr=spread, color=f"C{i}", error_kw={"linewidth": 0.8})
        if several:
            along = [row["kl"]["mean"] for row in one["positions"]]
            panels[1].plot(np.arange(len(bands)), along, color=f"C{i}", marker="o", markersize=4)
        layers = np.arange(len(one["hidden_error"]))
        depth.plot(layers, one["hidden_error"], color=f"C{i}", marker="o", markersize=3)
        if "weight_error" in one:
            errors = [layer["experts"] for layer in one["weight_error"]]
            depth.plot(layers, errors, color=f"C{i}", linestyle="--")
        missed = [np.nan if share is None else 1 - share for share in one["router"]["agreement"]]
        depth.plot(layers, missed, color=f"C{i}", linestyle=":")
    bars.set_yticks(np.arange(len(categories)), categories, fontsize=7)
    bars.set_ylim(len(categories) - 0.5, -0.5)
    bars.set_xlabel("mean KL(source || candidate), nats; bars: 95 % interval")
    bars.set_title("by category" if few else "by family of categories", loc="left", fontsize=10)
    if several:
        panels[1].set_xticks(np.arange(len(bands)), bands)
        panels[1].set_ylabel("mean KL, nats")
        panels[1].set_xlabel("position of the predicted token")
        which = "long texts" if "long" in results[0][1] else "all texts"
        panels[1].set_title(f"by position, {which}", loc="left", fontsize=10)
        panels[1].margins(0.12)
        panels[1].set_ylim(bottom=0)
    depth.set_xlabel("layer")
    depth.set_ylabel("relative error; share")
    depth.set_title("by depth, short texts" if "long" in results[0][1] else "by depth", loc="left", fontsize=10)
    depth.set_xticks(_ticks(len(results[0][1]["hidden_error"])))
    depth.set_ylim(bottom=0)
    kinds = [Line2D([], [], color="gray", linestyle=style, label=label) for style, label in STYLES.items()]
    names = [Line2D([], [], color=f"C{i}", linewidth=4, label=name) for i, (name, _) in enumerate(results)]
    depth.legend(handles=kinds + names, fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    with disk_errors(path), atomic(path) as stream:
        stream.write(buffer.getvalue())
