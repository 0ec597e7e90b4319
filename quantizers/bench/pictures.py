"""Draws the benchmarks' results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval.report.plot_style import SERIES, save

OURS, OTHER = SERIES[:2]
PHASES = ("forced pass", "changes", "sums", "search", "rounding", "search + rounding")
PHASE_COLOURS = dict(zip(PHASES, SERIES, strict=False))


def layer_picture(result: dict[str, Any], path: Path) -> None:
    """Bars of seconds by phase, with the share of the peak rate for phases that have one."""
    from matplotlib.figure import Figure

    seconds, shares = result["seconds"], result["shares"]
    figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    names = list(seconds)
    bars = axes.barh(names, [seconds[name] for name in names], color=OURS)
    labels = [f"{seconds[n]:.2f} s" + (f", {shares[n]:.0%} of peak" if n in shares else "") for n in names]
    axes.bar_label(bars, labels, padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.28)
    axes.set_xlabel("seconds")
    sizes = result["sizes"]
    axes.set_title(
        f"one layer: {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, {result['tokens']:,} tokens, "
        f"{result['machine']['device']}",
        fontsize=9,
    )
    save(figure, path)


def scaling_picture(result: dict[str, Any], path: Path) -> None:
    """A panel for each varied size, with logarithmic axes and the fitted exponents."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), dpi=130, layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    base = ", ".join(f"{name} {value:,}" for name, value in result["base"].items())
    figure.suptitle(
        f"random layers of {result['hidden']} x {result['width']}, one size varied, otherwise {base}; "
        f"{result['machine']['device']}",
        fontsize=9,
    )
    for axes, (name, part) in zip(panels, result["varied"].items(), strict=True):
        rows = part["rows"]
        for phase, exponent in part["exponents"].items():
            if phase in ("search", "rounding") and "search + rounding" in part["exponents"]:
                continue
            axes.loglog(
                [row[name] for row in rows],
                [row[phase] for row in rows],
                "o-",
                color=PHASE_COLOURS.get(phase, OURS),
                label=f"{phase}: exponent {exponent:.2f}",
            )
        axes.set_xticks([row[name] for row in rows], [f"{row[name]:,}" for row in rows], fontsize=7)
        axes.xaxis.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="both", labelsize=7)
        axes.set_xlabel(name)
        axes.set_ylabel("seconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, framealpha=0.6)
    save(figure, path)


def compare_picture(result: dict[str, Any], path: Path) -> None:
    """Ours and the library's side by side: seconds of a layer and of the whole route, bytes written, KL."""
    from matplotlib.figure import Figure

    layer, route = result["layer"], result["route"]
    figures = [
        ("one layer, seconds", layer["ours"]["seconds"], layer["library"]["seconds"]),
        ("whole route, seconds", route["ours"]["seconds"], route["library"]["seconds"]),
        ("written, MB", *(sum(route[who]["bytes"].values()) / 1e6 for who in ("ours", "library"))),
        ("KL, nats per token", route["ours"]["kl"], route["library"]["kl"]),
    ]
    figure = Figure(figsize=(9, 3.2), dpi=130, layout="constrained")
    sizes = layer["sizes"]
    figure.suptitle(
        f"layer: random, {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}, {layer['tokens']:,} tokens"
        f"; route: {route['model']} on {route['tokens']:,} tokens of {route['set']}; {result['machine']['device']}",
        fontsize=8,
    )
    for axes, (title, ours, library) in zip(figure.subplots(1, 4), figures, strict=True):
        bars = axes.bar(["ours", "llm-compressor"], [ours, library], color=[OURS, OTHER])
        axes.bar_label(bars, [f"{value:.3g}" for value in (ours, library)], fontsize=8)
        axes.set_title(f"{title} (ratio {library / ours:.1f})", fontsize=8)
        axes.margins(y=0.15)
        axes.tick_params(labelsize=8)
    save(figure, path)
