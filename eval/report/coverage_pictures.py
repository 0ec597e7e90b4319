"""Draws coverage.png, the load of every expert, and coverage-compare.png, how it changes between two sets.

Both have layers down and experts across, on the fixed scale of scale.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .pictures import save
from .scale import HIGH, LOW, MARKS, SERIES, UNCOVERED, loads, ticks

DIVERGING = "PuOr_r"  # colour-blind safe by ColorBrewer: purple for less, orange for more


def coverage_picture(layers: Sequence[dict[str, Any]], minimum: int, title: str, path: Path) -> None:
    """Draw layers by experts, brighter with the load; red with a cross below the minimum.

    Args:
        layers: the layers with experts, each with its number and the `routed_tokens` of its experts.
        minimum: routed tokens that an expert needs to count as covered.
        title: the model and the set.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tokens = np.array([row["routed_tokens"] for row in layers])  # (layers, experts)
    load = np.array([loads(row["routed_tokens"]) for row in layers])
    bare = tokens < max(minimum, 1)
    figure = Figure(figsize=_size(*tokens.shape), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(
        np.ma.masked_where(bare, load), aspect="auto", cmap="viridis", norm=LogNorm(LOW, HIGH), interpolation="nearest"
    )
    axes.set_facecolor(UNCOVERED)  # shows through where cells are masked
    if bare.any():
        places = np.argwhere(bare)
        axes.scatter(places[:, 1], places[:, 0], marker="x", s=_mark(tokens.shape[1]), c="white", linewidths=1.2)
        label = f"below {max(minimum, 1):,} tokens: {len(places):,} of {tokens.size:,}"
        figure.legend(handles=[Patch(color=UNCOVERED, label=label)], loc="outside lower right", frameon=False)
    axes.set_title(title, loc="left", fontsize=10)
    _name_axes(axes, [row["layer"] for row in layers], tokens.shape[1])
    even = tokens.sum(1).max() / tokens.shape[1]
    _colour_bar(figure, image, axes, f"routed tokens / even load\n(which is {even:,.0f} tokens)")
    save(figure, path)


def comparison_picture(found: dict[str, Any], title: str, path: Path) -> None:
    """Draw how each expert's share changes between two sets, and by layer the spread of both loads.

    Args:
        found: what `eval.coverage.measure.compare_coverage` returns.
        title: the model.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    layers = found["per_layer"]
    load = {
        side: np.array([loads(row[side]["routed_tokens"]) for row in layers]) for side in ("before", "after")
    }  # (layers, experts) each
    names = {side: found[side]["label"] for side in load}
    with np.errstate(divide="ignore", invalid="ignore"):
        change = load["after"] / load["before"]  # infinite where only the second set sends any tokens, NaN where none
    count, experts = change.shape
    width, height = _size(count, experts)
    figure = Figure(figsize=(width + 4, height + 0.6), layout="constrained", dpi=120)
    cells, ranges = figure.subplots(1, 2, sharey=True, width_ratios=(width - 1, 3))
    image = cells.imshow(
        np.ma.masked_invalid(np.where(np.isinf(change), HIGH * 2, np.where(change == 0, LOW / 2, change))),
        aspect="auto", cmap=DIVERGING, norm=LogNorm(LOW, HIGH), interpolation="nearest",
    )  # fmt: skip
    cells.set_facecolor("#bbbbbb")  # where neither set sends any tokens
    handles: list[Any] = []
    places = {row["layer"]: i for i, row in enumerate(layers)}
    for key, marker in (("won", "+"), ("lost", "x")):
        if found[key]:
            at = [(expert, places[layer]) for layer, expert in found[key]]
            cells.scatter(*zip(*at, strict=True), marker=marker, s=_mark(experts), c="black", linewidths=1.2)
            handles.append(Line2D([], [], marker=marker, color="black", linestyle="", label=f"{key}: {len(at):,}"))
    for side, shift, colour in (("before", -0.15, SERIES[0]), ("after", 0.15, SERIES[1])):
        rows = np.arange(count) + shift
        low, middle, high = np.clip(np.quantile(load[side], (0.1, 0.5, 0.9), axis=1), LOW, HIGH)
        ranges.hlines(rows, low, high, color=colour, linewidth=1.5)
        ranges.plot(middle, rows, "o", color=colour, markersize=3.5)
        tokens = sum(found[side]["tokens"].values())
        handles.append(Line2D([], [], color=colour, marker="o", label=f"{names[side]}: {tokens:,} tokens"))
    ranges.axvline(1, color="gray", linewidth=0.6)
    ranges.set_xscale("log")
    ranges.set_xlim(LOW * 0.93, HIGH * 1.07)
    ranges.set_xticks(list(MARKS), list(MARKS.values()))
    ranges.xaxis.minorticks_off()
    ranges.set_xlabel("routed tokens / even load\nline: 10th to 90th percentile, dot: median", fontsize=9)
    ranges.set_title("load of a layer's experts", loc="left", fontsize=9)
    cells.set_title(f"share of routed tokens, {names['after']} / {names['before']}", loc="left", fontsize=9)
    _name_axes(cells, [row["layer"] for row in layers], experts)
    _colour_bar(figure, image, cells, "ratio of shares")
    figure.suptitle(f"{title}: {names['before']} and {names['after']}", fontsize=10)
    figure.legend(handles=handles, loc="outside lower right", frameon=False, fontsize=8, ncols=len(handles))
    save(figure, path)


def _size(layers: int, experts: int) -> tuple[float, float]:
    """Width and height of a figure, inches."""
    return min(18.0, max(6.0, 0.11 * experts + 3)), min(14.0, max(2.8, 0.2 * layers + 1.6))


def _mark(experts: int) -> int:
    """Size of a cross in a cell, points squared."""
    return 60 if experts <= 32 else 12


def _name_axes(axes: Any, layers: Sequence[int], experts: int) -> None:
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_xticks(ticks(experts))
    axes.set_yticks(ticks(len(layers)), [layers[i] for i in ticks(len(layers))])
    axes.set_xlim(-0.5, experts - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)


def _colour_bar(figure: Any, image: Any, axes: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, extend="both", aspect=max(20, 6 * figure.get_figheight()))
    bar.set_ticks(list(MARKS), labels=list(MARKS.values()))
    bar.minorticks_off()
    bar.set_label(label, fontsize=9)
