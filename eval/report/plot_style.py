"""Colours and scales that all plots share, so that plots of two runs can be compared side by side.

An expert's load is its routed tokens divided by those of an even load of its layer. Every heat map shows it, or the
ratio of two of them, on the same logarithmic scale from LOW to HIGH; values beyond it take the colour of the end.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantizers.system.files import atomic, disk_errors

LOW, HIGH = 1 / 8, 8.0
MARKS = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
TICKS = 16  # layers or experts that get a tick label, at most

# For lines and bars: Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is pale on white.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
UNCOVERED = "#d62728"  # always with a cross, so that it does not depend on the colour
DIVERGING = "PuOr_r"  # colour-blind safe by ColorBrewer: purple for less, orange for more


def ticks(count: int) -> range:
    """At most TICKS of `count` positions, evenly spaced."""
    return range(0, count, max(1, -(-count // TICKS)))


def loads(tokens: Sequence[int]) -> list[float]:
    """The load of each expert of a layer, relative to an even one: 1 if all get the same."""
    total = sum(tokens)
    return [n * len(tokens) / total if total else 0.0 for n in tokens]


def colour(number: int) -> str:
    """The colour of a series by its number."""
    return SERIES[number % len(SERIES)]


def bare(axes: Any) -> None:
    """Remove the frame's upper and right side, and draw a faint grid for the values."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_fontsize(9)
    axes.yaxis.label.set_fontsize(9)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)


def png(figure: Any) -> bytes:
    """A figure as PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    with disk_errors(path), atomic(path) as stream:
        stream.write(png(figure))
