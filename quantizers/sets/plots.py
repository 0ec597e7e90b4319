"""The plots of `quantize compare` and `quantize calibration why`. They need no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.eval.coverage.figures import RoutingChange
from quantizers.eval.report.plots import (
    SERIES,
    TICKS,
    bare,
    colour,
    comparison_map,
    finite,
    heat_size,
    own_style,
    panel_title,
    short,
    ticks,
)

from .tables import against_first, measured, telling

FIELDS, SOURCES = 20, 50  # rows of a plot, at most
LETTERS = 80  # of a set's or source's name, at most
HIGHEST = 9.0  # inches of the heat map
REACH = 3  # an axis goes no further than this many times the largest change; longer whiskers leave the panel
UNTOLD = "#8a8f98"
EFFECTS = {"helps": SERIES[2], "hurts": SERIES[4], "no difference": UNTOLD, "too few texts": UNTOLD}
KEPT = ("family", "long")  # fields that are shown even if their interval is unknown


@own_style()
def sets_figure(comparison: dict[str, Any]) -> Any:
    """KL of each set, its change by field, hidden error by layer, and the experts' shares of two sets.

    Args:
        comparison: see `SetComparison` in quantizers/sets/schema.py.
    """
    from matplotlib.figure import Figure

    sets, pairs = comparison["sets"], against_first(comparison)
    fields = _fields(pairs)
    routing = comparison["pairs"][0]["routing"]
    upper = max(5.0, 1.6 + len(fields) * (0.17 + 0.09 * len(pairs)))  # inches
    lower = min(HIGHEST, max(3.4, heat_size(len(routing["per_layer"]), 1)[1]))
    figure = Figure(figsize=(14, upper + lower + 0.4), layout="constrained", dpi=120)
    halves: Any = figure.subfigures(2, 1, height_ratios=[upper, lower], hspace=0.02)
    above, below = halves
    tall = 0.4 + 0.45 * len(sets)
    panels = above.subplot_mosaic([["kl", "fields"], ["errors", "fields"]], height_ratios=[tall, upper - tall])
    for panel in panels.values():
        bare(panel)
    _kl(panels["kl"], sets)
    _changes(panels["fields"], pairs, fields)
    _errors(panels["errors"], sets)
    first, other = (short(routing[side]["label"]) for side in ("before", "after"))
    comparison_map(
        below,
        RoutingChange.model_validate(routing),
        f"experts' shares: {other} / {first}",
        "share of routed tokens,\nratio",
    )
    figure.suptitle(f"{short(Path(comparison['model']).name)}: {measured(comparison)}", fontsize=11)
    return figure


def _kl(axes: Any, sets: Sequence[dict[str, Any]]) -> None:
    for i, row in enumerate(sets):
        _whiskers(axes, i + 0.1, row["kl"]["mean"], row["kl"]["interval"], colour(i), filled=True)
        if len(row["kl"]["per_draw"]) > 1:
            drawn = finite(row["kl"]["per_draw"])
            axes.plot(drawn, [i + 0.35] * len(drawn), ".", color=colour(i), markersize=4, alpha=0.7)
        axes.text(0.01, i - 0.2, short(row["label"], LETTERS), fontsize=8, transform=axes.get_yaxis_transform())
    axes.set_xlabel("mean KL(source || output), nats per token; dots: draws")
    axes.margins(x=0.08)
    axes.tick_params(axis="y", length=0)
    _rows(axes, [""] * len(sets), "KL by set; the other panels have the same colours")


def _fields(pairs: Sequence[dict[str, Any]]) -> list[str]:
    """The fields that are shown: families and the long texts, then the categories of which most can be said."""
    rows = [row for pair in pairs for row in pair["fields"]]
    kept = dict.fromkeys(row["name"] for row in rows if row["kind"] in KEPT)
    others = telling(row for row in rows if row["kind"] not in KEPT and row["interval"])
    return list(dict.fromkeys([*kept, *(row["name"] for row in others)]))[:FIELDS]


def _changes(axes: Any, pairs: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
    step, shown = 0.7 / len(pairs), []
    for number, pair in enumerate(pairs):
        rows = {row["name"]: row for row in pair["fields"]}
        for y, row in enumerate([pair, *(rows[name] for name in fields)]):
            at = y + (number - (len(pairs) - 1) / 2) * step
            _whiskers(axes, at, *_percent(row), colour(number + 1), filled=row["verdict"] in ("better", "worse"))
            shown.append(row)
    axes.axhline(0.5, color="#c3c7cc", linewidth=0.8)
    few = "" if all(row["interval"] for row in shown) else "; cross: too few texts"
    _around_zero(axes, f"change of mean KL against {short(pairs[0]['first'])}, %", shown)
    shares = f"{len(fields)} of {len(pairs[0]['fields'])} fields"
    _rows(axes, ["all texts", *map(short, fields)], f"change by field ({shares}); filled: significant, by Holm{few}")


def _errors(axes: Any, sets: Sequence[dict[str, Any]]) -> None:
    for i, row in enumerate(sets):
        mean, low, high = (finite([layer[key] for layer in row["hidden_error"]]) for key in ("mean", "low", "high"))
        axes.plot(mean, color=colour(i), marker="o" if len(mean) <= TICKS else "", markersize=3, linewidth=1.2)
        axes.fill_between(range(len(mean)), low, high, color=colour(i), alpha=0.2, linewidth=0)
    axes.set_xticks(ticks(len(sets[0]["hidden_error"])))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("layer")
    axes.set_ylabel("relative error")
    panel_title(axes, "error of the hidden states by depth; band: draws")


@own_style()
def sources_figure(effects: dict[str, Any]) -> Any:
    """Plot the effect of each source on a set: the change of KL without it, with intervals.

    Args:
        effects: see `SourceEffects` in quantizers/sets/schema.py.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    kept = {row["source"] for row in telling(effects["sources"])[:SOURCES]}
    rows = [row for row in effects["sources"] if row["source"] in kept]
    figure = Figure(figsize=(12, 1.8 + 0.22 * len(rows)), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    bare(axes)
    for y, row in enumerate(rows):
        _whiskers(axes, y, *_percent(row), EFFECTS[row["verdict"]], filled=EFFECTS[row["verdict"]] != UNTOLD)
    _around_zero(axes, "change of mean KL without the source, %; to the right: the source helps", rows)
    left_out = len(effects["sources"]) - len(rows)
    more = f"; {left_out} with smaller changes are left out" if left_out else ""
    names = [short(row["source"], LETTERS) for row in rows]
    _rows(axes, names, f"sources of {short(effects['set']['label'], LETTERS)}, verdicts by Holm{more}")
    marks = [
        Line2D([], [], linestyle="", label=verdict, **_mark(hue, hue != UNTOLD, verdict != "too few texts"))
        for verdict, hue in EFFECTS.items()
        if any(row["verdict"] == verdict for row in rows)
    ]
    figure.legend(handles=marks, fontsize=8, frameon=False, loc="outside lower center", ncols=len(marks))
    figure.suptitle(f"{short(Path(effects['model']).name)}: {measured(effects)}", fontsize=11)
    return figure


# Forest plots ------------------------------------------------------------------------------------------------------


def _percent(row: dict[str, Any]) -> tuple[float, list[float] | None]:
    """A change and its interval in per cent."""
    change, interval = row["change"], row["interval"]
    return np.nan if change is None else 100 * change, interval and [100 * end for end in interval]


def _whiskers(axes: Any, y: float, x: float, interval: Sequence[float] | None, hue: str, *, filled: bool) -> None:
    if interval:
        axes.plot(interval, [y, y], color=hue, linewidth=1.2, marker="|", markersize=4)
    axes.plot(x, y, **_mark(hue, filled, bool(interval)))


def _mark(hue: str, filled: bool, known: bool) -> dict[str, Any]:
    """A circle, filled or not, or a cross where the interval is not known."""
    face = hue if filled else "white"
    return {"marker": "o" if known else "x", "color": hue, "markerfacecolor": face, "markersize": 5}


def _around_zero(axes: Any, label: str, rows: Sequence[dict[str, Any]]) -> None:
    drawn = [_percent(row) for row in rows]
    ends = [end for change, interval in drawn for end in (change, *(interval or ())) if np.isfinite(end)]
    reach = REACH * max((abs(change) for change, _ in drawn if np.isfinite(change)), default=1)
    low, high = max(min(ends, default=-1), -reach), min(max(ends, default=1), reach)
    axes.set_xlim(min(low, 0) - 0.04 * (high - low), max(high, 0) + 0.04 * (high - low))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(label)


def _rows(axes: Any, names: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    panel_title(axes, title)
