"""The plots of the HTML report, the model card, `quantize eval` and `quantize coverage`. They need no display.

An expert's load is its routed tokens divided by those of an even load of its layer. Every heat map shows it, the ratio
of two of them, or an expert's saliency divided by the layer's mean, on one logarithmic scale from LOW to HIGH, with the
colour of the end beyond it: so plots of two runs can be compared side by side.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.eval.coverage.figures import LayerCoverage, LayerSaliency, RoutingChange
from quantizers.eval.fidelity.figures import Fidelity, Figures
from quantizers.eval.fidelity.tables import CATEGORY_ROWS, Results, shown_categories
from quantizers.system.errors import QuantizeError
from quantizers.system.extras import lacking
from quantizers.system.files import atomic, disk_errors

from .schema import Calibration, GramErrors, Report, RunReport, StitchReport, Tally

LOW, HIGH = 1 / 8, 8.0
MARKS = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
WIDEST = 48  # letters of a name below a bar, at most
TICKS = 16  # layers or experts that get a tick label, at most

# For lines and bars: Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is pale on white.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
FORMS: dict[str, dict[str, None]] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}  # without dates
UNCOVERED = "#d62728"  # always with a cross, so that it does not depend on the colour
DIVERGING = "PuOr_r"  # colour-blind safe by ColorBrewer: purple for less, orange for more
ERRORS = {"-": "hidden states", "--": "experts' weights"}
LANGUAGES = {"programming": "programming languages", "spoken": "spoken languages"}


@contextlib.contextmanager
def own_style() -> Iterator[None]:
    """Matplotlib's own defaults, whatever a matplotlibrc or MPLBACKEND says; no text is taken for mathematics."""
    backend = os.environ.pop("MPLBACKEND", None) if "matplotlib" not in sys.modules else None
    import matplotlib

    if backend is not None:  # a notebook's: matplotlib cannot be imported with one that is not installed beside it
        os.environ["MPLBACKEND"] = backend
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
    plain = {key: value for key, value in matplotlib.rcParamsDefault.items() if key != "backend"}
    own = {"text.parse_math": False, "svg.hashsalt": "quantize"}
    with matplotlib.rc_context(plain | own), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # such as of a letter that the font lacks, which is then a box
        yield


def draw(report: Report) -> tuple[dict[str, bytes], list[str]]:
    """The plots of the report of a run or a stitch as PNG, by name, those that it has data for, and a line for each
    that failed; the same report gives the same bytes.
    """
    if lack := lacking("matplotlib"):
        return {}, [f"no pictures: {'; '.join(lack)}"]
    name, panels = Path(report.source.model).name, _panels(report)
    plots: dict[str, Callable[[], Any]] = {}
    if isinstance(report, RunReport):
        coverage, title = report.coverage, f"{name} on {report.calibration.name}"
        plots["calibration"] = partial(calibration_figure, report.calibration, name)
        plots["coverage"] = partial(coverage_figure, coverage.per_layer, coverage.min_routed_tokens, title)
    if isinstance(report, Fidelity):
        plots["fidelity"] = partial(fidelity_figure, [("output", report)], stacked=True)
    if panels:
        plots["layers"] = partial(layers_figure, panels)
    drawn, failed = {}, []
    for key, figure in plots.items():
        try:
            drawn[key] = png(figure())
        except Exception as failure:  # of a library that is no part of the result, which would be lost with it
            first = (str(failure).splitlines() or [""])[0]
            failed.append(f"the picture of {key} could not be drawn ({type(failure).__name__}: {first})")
    return drawn, failed


# Fidelity ----------------------------------------------------------------------------------------------------------


@own_style()
def fidelity_figure(results: Results, title: str = "", *, stacked: bool = False) -> Any:
    """Mean KL by category with intervals, and by position; by depth the errors of hidden states, weights and router.

    It has two columns if `stacked`, for a page, instead of one row.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    panels = {"categories": _categories, "positions": _positions, "errors": _errors, "router": _router}
    if len(results[0][1].positions) < 2:
        del panels["positions"]
    others = [name for name in panels if name != "categories"]
    bars = len(_tables(results)[0]) * (0.1 + 0.09 * len(results))
    if stacked:
        size, layout = (10.0, max(7.0, 1.2 + bars)), [["categories", name] for name in others]
    else:
        size, layout = (5.2 * len(panels), min(16.0, max(4.5, 1.5 + bars))), [list(panels)]
    figure = Figure(figsize=size, layout="constrained", dpi=120)
    widths = None if stacked else [1.0] + [0.7] * len(others)
    axes: dict[str, Any] = figure.subplot_mosaic(layout, width_ratios=widths)
    for name, panel in panels.items():
        bare(axes[name])
        panel(axes[name], results)
    figure.suptitle(title, fontsize=11)
    if len(results) > 1 or not stacked:
        names = [Line2D([], [], color=colour(i), linewidth=4, label=name) for i, (name, _) in enumerate(results)]
        figure.legend(handles=names, fontsize=8, frameon=False, loc="outside lower center", ncols=min(4, len(names)))
    return figure


def _tables(results: Results) -> list[dict[str, Figures]]:
    """The bars of each candidate by name: categories, or families and the worst categories; then the long texts."""
    first, tables = results[0][1], []
    for _, candidate in results:
        table = {
            name: candidate.categories[name] if row is first.categories.get(name) else candidate.families[name]
            for name, row in shown_categories(first).items()
        }
        tables.append(table | ({"long texts": candidate.long} if candidate.long else {}))
    return tables


def _categories(axes: Any, results: Results) -> None:
    tables = _tables(results)
    categories, band = list(tables[0]), 0.8 / len(results)
    for i, table in enumerate(tables):
        means = np.array([table[name].kl.mean for name in categories], dtype=float)
        at = np.arange(len(categories)) + (i - (len(results) - 1) / 2) * band
        axes.barh(at, means, height=band * 0.9, color=colour(i))
        ends = means.copy()
        intervals = {n: interval for n, name in enumerate(categories) if (interval := table[name].interval)}
        if known := list(intervals):
            spans = np.array([interval.kl for interval in intervals.values()], dtype=float).T
            spread = np.abs(spans - means[known])  # (2, categories with an interval)
            axes.errorbar(means[known], at[known], xerr=spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
            ends[known] = spans[1]
        for y, mean, end in zip(at, means, ends, strict=True) if len(results) == 1 else ():
            axes.annotate(f"{mean:.4f}", (end, y), (4, 0), textcoords="offset points", va="center", fontsize=6.5)
    axes.set_yticks(np.arange(len(categories)), [short(name) for name in categories], fontsize=7)
    axes.set_ylim(len(categories) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_xlabel("mean KL(source || candidate), nats per token\nwhiskers: 95 % bootstrap interval over texts")
    all_of_them = len(results[0][1].categories) <= CATEGORY_ROWS
    panel_title(axes, "KL by category" if all_of_them else "KL by family, then the worst categories")


def _positions(axes: Any, results: Results) -> None:
    bands = [band.name for band in results[0][1].positions]
    for i, (_, candidate) in enumerate(results):
        axes.plot([band.kl.mean for band in candidate.positions], color=colour(i), marker="o", markersize=4)
    axes.set_xticks(np.arange(len(bands)), bands)
    axes.set(ylabel="mean KL, nats per token", xlabel="position of the predicted token")
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    panel_title(axes, f"KL by position, {'long texts' if results[0][1].long else 'all texts'}")


def _errors(axes: Any, results: Results) -> None:
    from matplotlib.lines import Line2D

    weights = any(candidate.weight_error for _, candidate in results)
    for i, (_, candidate) in enumerate(results):
        axes.plot(finite(candidate.hidden_error), color=colour(i), marker="o", markersize=3)
        if candidate.weight_error:
            axes.plot([layer.experts for layer in candidate.weight_error], color=colour(i), linestyle="--")
    axes.set_ylabel("relative error")
    if weights:
        kinds = [Line2D([], [], color="gray", linestyle=style, label=label) for style, label in ERRORS.items()]
        axes.legend(handles=kinds, fontsize=8, frameon=False)
    _depth(axes, results, "errors by depth" if weights else "error of the hidden states by depth")


def _router(axes: Any, results: Results) -> None:
    from matplotlib.ticker import PercentFormatter

    for i, (_, candidate) in enumerate(results):
        missed = [1 - share for share in finite(candidate.router.agreement)]
        axes.plot(missed, color=colour(i), marker="o", markersize=3)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylabel("share of all choices")
    _depth(axes, results, "experts chosen otherwise by depth")


def _depth(axes: Any, results: Results, title: str) -> None:
    axes.set(xlabel="layer", xticks=ticks(len(results[0][1].hidden_error)), ylim=(0, None))
    panel_title(axes, f"{title}, short texts" if results[0][1].long else title)


def finite(values: Sequence[float | None]) -> list[float]:
    """Numbers of a report for a line, which is interrupted where there is none."""
    return [np.nan if value is None else value for value in values]


def panel_title(axes: Any, words: str) -> None:
    axes.set_title(words, loc="left", fontsize=10)


# By layer ----------------------------------------------------------------------------------------------------------


Line = list[float | None]  # a value for each layer; None interrupts it


def _panels(report: Report) -> dict[str, dict[str, Line]]:
    """The lines over a report's layers: search and rounding of a run, or the probed experts of a stitch."""
    if isinstance(report, StitchReport):
        lines: dict[str, Line] = {
            "with the ratio of the norms": [layer.error for layer in report.layers],
            "without": [layer.error_unscaled for layer in report.layers],
        }
        return {"largest relative error": lines} if report.layers else {}
    errors = [layer.error for layer in report.layers] if isinstance(report, RunReport) else []
    rounded = [error if isinstance(error, GramErrors) else None for error in errors]
    search: dict[str, Line] = {
        "norm → router, w1, w3": [error.left_in_norm for error in errors],
        "w3 → w2": [error.left_in_down for error in errors],
    }
    rounding: dict[str, Line] = {
        "w1 and w3": [error.gate_up_rounding if error else None for error in rounded],
        "w2": [error.down_rounding if error else None for error in rounded],
    }
    panels = {
        "AWQ's objective after the search / before": _known(search),
        "relative error of outputs after rounding": _known(rounding),
    }
    return {title: lines for title, lines in panels.items() if lines}


def _known(lines: dict[str, Line]) -> dict[str, Line]:
    return {name: values for name, values in lines.items() if any(value is not None for value in values)}


@own_style()
def layers_figure(panels: Mapping[str, Mapping[str, Sequence[float | None]]]) -> Any:
    """Lines over the layers, a panel for each title and a line for each name in it; None interrupts a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained", dpi=120)
    for axes, (title, series) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        bare(axes)
        for number, (name, values) in enumerate(series.items()):
            axes.plot(finite(values), color=colour(number), marker="o", markersize=3, label=name)
            axes.set_xticks(ticks(len(values)))
        axes.set(ylim=(0, None), xlabel="layer")
        axes.legend(fontsize=8, frameon=False)
        panel_title(axes, title)
    return figure


# Coverage ----------------------------------------------------------------------------------------------------------


@own_style()
def coverage_figure(layers: Sequence[LayerCoverage], minimum: int, title: str) -> Any:
    """A heat map of layers by experts, brighter with the load; red with a cross below the minimum of routed tokens.

    Args:
        layers: the layers with experts, each with its number and the `routed_tokens` of its experts.
        title: the model and the set.
    """
    tokens = np.array([row.routed_tokens for row in layers])  # (layers, experts)
    label = f"routed tokens / even load\n(which is {tokens.sum(1).max() / tokens.shape[1]:,.0f} tokens)"
    below, words = tokens < max(minimum, 1), f"below {max(minimum, 1):,} tokens"
    return _crossed_out(layers, tokens, label, below, words, title)


@own_style()
def saliency_figure(layers: Sequence[LayerCoverage], scored: Sequence[LayerSaliency], title: str) -> Any:
    """A heat map of layers by experts, brighter with the score; red with a cross without tokens.

    As for `coverage_figure`, and `scored` are the same layers with the `scores` of their experts.
    """
    scores = np.array([row.scores for row in scored])
    silent = np.array([row.routed_tokens for row in layers]) == 0
    return _crossed_out(layers, scores, "saliency / the layer's mean", silent, "without tokens", f"{title}: saliency")


def _crossed_out(
    layers: Sequence[LayerCoverage], values: np.ndarray, label: str, out: np.ndarray, words: str, title: str
) -> Any:
    """A heat map of the `loads` of values, with a red cross over the cells that are `out`, which the words count."""
    from matplotlib.patches import Patch

    figure, shown = _heat_figure(*values.shape), np.where(out, np.nan, [loads(row) for row in values.tolist()])
    axes = _heat_map(figure, shown, [row.layer for row in layers], label, colours="viridis", without=UNCOVERED)
    if out.any():
        _crosses(axes, np.argwhere(out), marker="x", c="white")
        counted = f"{words}: {int(out.sum()):,} of {out.size:,}"
        figure.legend(handles=[Patch(color=UNCOVERED, label=counted)], loc="outside lower right", frameon=False)
    panel_title(axes, title)
    return figure


@own_style()
def comparison_figure(change: RoutingChange, title: str) -> Any:
    """A heat map of how each expert's share changes between two sets, marked where it becomes covered or uncovered.

    The title is the model.
    """
    sides = (change.before, change.after)
    tokens = (f"{side.label} ({sum(side.tokens.values()):,} tokens)" for side in sides)
    figure = _heat_figure(len(change.per_layer), len(change.per_layer[0].before.routed_tokens))
    label = f"share of routed tokens,\n{change.after.label} / {change.before.label}"
    comparison_map(figure, change, f"{title}: {' and '.join(tokens)}", label)
    return figure


def comparison_map(figure: Any, change: RoutingChange, title: str, label: str) -> None:
    """The same in a figure or a part of one; `label` is that of the colour bar."""
    layers = change.per_layer
    before = np.array([loads(row.before.routed_tokens) for row in layers])  # (L, E)
    after = np.array([loads(row.after.routed_tokens) for row in layers])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = after / before  # infinite where only the second set sends any tokens, NaN where none
    shown = np.where(np.isinf(ratio), HIGH * 2, np.where(ratio == 0, LOW / 2, ratio))
    rows = {row.layer: i for i, row in enumerate(layers)}
    axes = _heat_map(figure, shown, list(rows), label, colours=DIVERGING, without="#bbbbbb")
    for pairs, marker, words in ((change.won, "+", "newly covered"), (change.lost, "x", "no longer covered")):
        if pairs:
            cells = np.array([(rows[layer], expert) for layer, expert in pairs])
            _crosses(axes, cells, marker=marker, c="black", label=f"{words}: {len(cells):,}")
    panel_title(axes, title)
    if change.won or change.lost:
        figure.legend(loc="outside lower right", frameon=False, fontsize=8, ncols=2)


def heat_size(rows: int, experts: int) -> tuple[float, float]:
    """Width and height of a heat map, in inches."""
    return min(18.0, max(8.0, 0.11 * experts + 3)), min(14.0, max(2.8, 0.2 * rows + 1.6))


def _heat_figure(rows: int, experts: int) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=heat_size(rows, experts), layout="constrained", dpi=120)


def _heat_map(figure: Any, values: np.ndarray, layers: Sequence[int], label: str, *, colours: str, without: str) -> Any:
    """Axes in a figure or a part of one: values (layers, experts) on the logarithmic scale, NaN in `without`; `label`
    is that of the colour bar.
    """
    from matplotlib.colors import LogNorm

    rows, experts = values.shape
    axes, shown = figure.add_subplot(), np.ma.masked_invalid(values)
    image = axes.imshow(shown, aspect="auto", cmap=colours, norm=LogNorm(LOW, HIGH), interpolation="nearest")
    axes.set(facecolor=without, xlabel="expert", ylabel="layer", xticks=ticks(experts))
    axes.set_yticks(ticks(rows), [str(layers[i]) for i in ticks(rows)])
    bar = figure.colorbar(image, ax=axes, extend="both", aspect=max(20, 6 * heat_size(rows, experts)[1]))
    bar.set_ticks(list(MARKS), labels=list(MARKS.values()))
    bar.minorticks_off()
    bar.set_label(label, fontsize=9)
    return axes


def _crosses(axes: Any, cells: np.ndarray, **how: Any) -> None:
    points = 60 if axes.get_xlim()[1] <= 32 else 12  # squared
    axes.scatter(cells[:, 1], cells[:, 0], s=points, linewidths=1.2, **how)


# Calibration -------------------------------------------------------------------------------------------------------


@own_style()
def calibration_figure(calibration: Calibration, model: str) -> Any:
    """Tokens by programming language, by spoken language, and by field, and which share of them was cut off.

    `model` is that whose tokenizer counted the tokens.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    fields = {n: row for n, row in calibration.categories.items() if not n.startswith(("code/", "spoken/"))}
    groups = [(title, calibration.by_language[kind]) for kind, title in LANGUAGES.items()]
    groups += [("other fields", fields)]
    groups = [(title, rows) for title, rows in groups if any(row.tokens for row in rows.values())]
    groups = groups or [("categories", calibration.categories)]
    asked = {LANGUAGES[kind]: sum(counts.values()) for kind, counts in calibration.asked_for.items()}
    # Places in inches: matplotlib's own layouts measure every label, which takes longer than all the rest.
    # Below the bars are their names, turned.
    below = [0.3 + 0.065 * max(len(short(name)) for name in rows) for _, rows in groups]
    height = 0.5 + sum(2.6 + under for under in below)
    figure = Figure(figsize=(12, height), dpi=100)
    figure.suptitle(_heading(calibration, model), fontsize=11, y=1 - 0.2 / height)
    panels, top = [], height - 0.5
    for under in below:
        for gap, high in ((0.3, 1.4), (0.15, 0.75)):
            top -= gap + high
            panels.append(figure.add_axes((0.07, top / height, 0.92, high / height)))
        top -= under
    highest = max(row.tokens for _, rows in groups for row in rows.values())
    for (title, rows), tokens, cut in zip(groups, panels[::2], panels[1::2], strict=True):
        names = sorted(rows, key=lambda name: (-rows[name].tokens, name))
        at = range(len(names))
        bars = tokens.bar(at, [rows[name].tokens for name in names], color=SERIES[0], width=0.8)
        tokens.bar_label(bars, [f"{rows[name].samples:,}" for name in names], fontsize=7)
        tokens.set(xticks=[], ylabel="tokens", ylim=(0, 1.15 * highest))  # one scale for all groups
        tokens.yaxis.set_major_formatter("{x:,.0f}")
        more = f"; {asked[title]:,} more only ask for one" if asked.get(title) else ""
        tokens.set_title(f"{title} ({len(names)}); above the bars: samples{more}", loc="left", fontsize=10)
        cut.bar(at, [_lost(rows[name]) for name in names], color=SERIES[1], width=0.8)
        cut.set_xticks(at, [short(name) for name in names], rotation=90, fontsize=8)
        cut.set(ylabel="cut off", ylim=(0, 1))
        cut.yaxis.set_major_formatter(PercentFormatter(1))
        for axis in (tokens, cut):
            axis.set_xlim(-0.6, max(8, len(names)) - 0.4)
            bare(axis)
    figure.align_ylabels(panels)
    return figure


def _lost(row: Tally | Calibration) -> float:
    """Share of a row's tokens that were cut off, of those that its texts had."""
    whole = row.tokens + row.truncated_tokens
    return row.truncated_tokens / whole if whole else 0.0


def _heading(calibration: Calibration, model: str) -> str:
    count, whole = calibration.truncated_samples, f"{calibration.name} for {model}"
    cut = f"{count:,} samples were cut, and lost {_lost(calibration):.0%} of the texts' tokens"
    size = f"{calibration.samples:,} samples, {calibration.tokens:,} tokens"
    return f"{whole}: {size}; {cut if count else 'no sample was cut'}"


# Style -------------------------------------------------------------------------------------------------------------


def short(name: str, widest: int = WIDEST) -> str:
    """A name in one line of at most `widest` letters."""
    line = " ".join(name.split())
    return line if len(line) <= widest else f"{line[: widest - 1]}…"


def ticks(count: int) -> range:
    """At most TICKS of `count` positions, evenly spaced."""
    return range(0, count, max(1, -(-count // TICKS)))


def loads(tokens: Sequence[float]) -> list[float]:
    """The load of each expert of a layer, or its score, relative to an even one: 1 if all get the same."""
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


@own_style()
def png(figure: Any, form: str = "png") -> bytes:
    """A figure as PNG, or in another form of FORMS; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, metadata=FORMS[form])
    return buffer.getvalue()


def saved(figure: Callable[[], Any], path: Path) -> str:
    """Draw a figure into a file, in the form of its ending or else as PNG, atomically; returns a line that names it.

    Raises QuantizeError: matplotlib is not installed, or the file cannot be written.
    """
    if lack := lacking("matplotlib"):
        raise QuantizeError("", *lack)
    form = path.suffix.lower().removeprefix(".")
    drawn = png(figure(), form if form in FORMS else "png")
    with disk_errors(path), atomic(path) as stream:
        stream.write(drawn)
    return f"picture: {path}"
