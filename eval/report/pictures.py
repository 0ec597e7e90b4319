"""Draws fidelity.png, which shows the tables of `quantize eval` at a glance. Needs no display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.fidelity.tables import CATEGORY_ROWS
from quantizers.system.files import atomic, disk_errors

from .scale import SERIES, ticks

Results = Sequence[tuple[str, dict[str, Any]]]
ERRORS = {"-": "hidden states", "--": "experts' weights"}


def fidelity_picture(results: Results, title: str, path: Path) -> None:
    """Draw mean KL by category, with intervals, and by position; and by depth the errors of states, weights, router.

    Args:
        results: name and figures of each candidate.
        title: the source and the set.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    several = len(results[0][1]["positions"]) > 1
    draw = [(_categories, 1.0), *([(_positions, 0.7)] if several else []), (_errors, 0.7), (_router, 0.7)]
    rows = len(_tables(results)[0])
    size = (5.2 * len(draw), min(16.0, max(4.5, 1.5 + rows * (0.1 + 0.09 * len(results)))))
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    panels = figure.subplots(1, len(draw), width_ratios=[width for _, width in draw])
    for axes, (panel, _) in zip(panels, draw, strict=True):
        panel(axes, results)
    figure.suptitle(title, fontsize=11)
    names = [Line2D([], [], color=_colour(i), linewidth=4, label=name) for i, (name, _) in enumerate(results)]
    figure.legend(handles=names, fontsize=8, frameon=False, loc="outside lower center", ncols=min(4, len(names)))
    save(figure, path)


def _colour(number: int) -> str:
    return SERIES[number % len(SERIES)]


def _few(results: Results) -> bool:
    """Whether every category is drawn, and not only their families."""
    return len(results[0][1]["categories"]) <= CATEGORY_ROWS


def _tables(results: Results) -> list[dict[str, Any]]:
    """The bars of each candidate by name: categories or families, then the long texts."""
    kind = "categories" if _few(results) else "families"
    return [one[kind] | ({"long texts": one["long"]} if "long" in one else {}) for _, one in results]


def _categories(axes: Any, results: Results) -> None:
    tables = _tables(results)
    categories, band = list(tables[0]), 0.8 / len(results)
    for i, table in enumerate(tables):
        means = np.array([table[name]["kl"]["mean"] for name in categories])
        at = np.arange(len(categories)) + (i - (len(results) - 1) / 2) * band
        axes.barh(at, means, height=band * 0.9, color=_colour(i))
        known = [n for n, name in enumerate(categories) if table[name]["interval"]]
        if known:
            ends = np.array([table[categories[n]]["interval"]["kl"] for n in known]).T
            spread = np.abs(ends - means[known])  # (2, categories with an interval)
            axes.errorbar(means[known], at[known], xerr=spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    axes.set_yticks(np.arange(len(categories)), categories, fontsize=7)
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("mean KL(source || candidate), nats per token\nwhiskers: 95 % bootstrap interval over texts")
    _title(axes, "KL by category" if _few(results) else "KL by family of categories")


def _positions(axes: Any, results: Results) -> None:
    bands = [row["name"] for row in results[0][1]["positions"]]
    for i, (_, one) in enumerate(results):
        along = [row["kl"]["mean"] for row in one["positions"]]
        axes.plot(np.arange(len(bands)), along, color=_colour(i), marker="o", markersize=4)
    axes.set_xticks(np.arange(len(bands)), bands)
    axes.set_ylabel("mean KL, nats per token")
    axes.set_xlabel("position of the predicted token")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    _title(axes, f"KL by position, {'long texts' if 'long' in results[0][1] else 'all texts'}")


def _errors(axes: Any, results: Results) -> None:
    from matplotlib.lines import Line2D

    for i, (_, one) in enumerate(results):
        axes.plot(one["hidden_error"], color=_colour(i), marker="o", markersize=3)
        if "weight_error" in one:
            axes.plot([layer["experts"] for layer in one["weight_error"]], color=_colour(i), linestyle="--")
    axes.set_ylabel("relative error")
    kinds = [Line2D([], [], color="gray", linestyle=style, label=label) for style, label in ERRORS.items()]
    axes.legend(handles=kinds, fontsize=8, frameon=False)
    _depth(axes, results, "errors by depth")


def _router(axes: Any, results: Results) -> None:
    from matplotlib.ticker import PercentFormatter

    for i, (_, one) in enumerate(results):
        missed = [np.nan if share is None else 1 - share for share in one["router"]["agreement"]]
        axes.plot(missed, color=_colour(i), marker="o", markersize=3)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("share of the source's expert choices")
    _depth(axes, results, "router's other choices by depth")


def _depth(axes: Any, results: Results, title: str) -> None:
    axes.set_xlabel("layer")
    axes.set_xticks(ticks(len(results[0][1]["hidden_error"])))
    axes.set_ylim(bottom=0)
    _title(axes, f"{title}, short texts" if "long" in results[0][1] else title)


def _title(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", fontsize=10)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    with disk_errors(path), atomic(path) as stream:
        stream.write(buffer.getvalue())
