"""The card's two pictures: what the model was calibrated on, and how many tokens the router sent to each expert.

The same report gives the same bytes: the files hold no date and no software name, and no display is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.system.output_files import CALIBRATION_PICTURE, COVERAGE_PICTURE

from .coverage_pictures import coverage_picture
from .pictures import save
from .scale import SERIES

ROWS = {"programming": "programming languages", "spoken": "spoken languages"}


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write both pictures of a report into a folder."""
    model, calibration = Path(report["source"]["model"]).name, report["calibration"]
    save(calibration_figure(calibration, model), folder / CALIBRATION_PICTURE)
    coverage = report["coverage"]
    title = f"{model} on {calibration['name']}"
    coverage_picture(coverage["per_layer"], coverage["min_routed_tokens"], title, folder / COVERAGE_PICTURE)


def calibration_figure(calibration: dict[str, Any], model: str) -> Any:
    """Tokens by programming language, by spoken language, and by field, and which share of them was cut off.

    Args:
        calibration: of a report; its `by_language` and `categories` hold rows with samples, tokens, truncated (samples)
            and truncated_tokens.
        model: whose tokenizer counted the tokens.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    fields = {n: row for n, row in calibration["categories"].items() if not n.startswith(("code/", "spoken/"))}
    groups = [(title, calibration["by_language"][kind]) for kind, title in ROWS.items()] + [("other fields", fields)]
    groups = [(title, rows) for title, rows in groups if rows] or [("categories", calibration["categories"])]
    figure = Figure(figsize=(12, 3.6 * len(groups)), dpi=100, layout="constrained")
    figure.suptitle(_heading(calibration, model), fontsize=11)
    panels = figure.subplots(2 * len(groups), 1, squeeze=False, height_ratios=[2, 1] * len(groups))[:, 0]
    highest = max(row["tokens"] for _, rows in groups for row in rows.values())
    for (title, rows), tokens, cut in zip(groups, panels[::2], panels[1::2], strict=True):
        names = sorted(rows, key=lambda name: (-rows[name]["tokens"], name))
        at = range(len(names))
        bars = tokens.bar(at, [rows[name]["tokens"] for name in names], color=SERIES[0], width=0.8)
        tokens.bar_label(bars, [f"{rows[name]['samples']:,}" for name in names], fontsize=7)
        tokens.set_xticks([])
        tokens.set_ylabel("tokens")
        tokens.yaxis.set_major_formatter("{x:,.0f}")
        tokens.set_ylim(0, 1.15 * highest)  # one scale for all groups
        tokens.set_title(f"{title} ({len(names)}); above the bars: samples", loc="left", fontsize=10)
        cut.bar(at, [_lost(rows[name]) for name in names], color=SERIES[1], width=0.8)
        cut.set_xticks(at, names, rotation=90, fontsize=8)
        cut.set_ylabel("cut off")
        cut.set_ylim(0, 1)
        cut.yaxis.set_major_formatter(PercentFormatter(1))
        for axis in (tokens, cut):
            axis.set_xlim(-0.6, max(8, len(names)) - 0.4)
            axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels(panels)
    return figure


def _lost(row: dict[str, Any]) -> float:
    """Share of a row's tokens that were cut off, of those that its texts had."""
    whole = row["tokens"] + row["truncated_tokens"]
    return row["truncated_tokens"] / whole if whole else 0.0


def _heading(calibration: dict[str, Any], model: str) -> str:
    count = calibration["truncated_samples"]
    cut = f"{count:,} samples were cut, and lost {_lost(calibration):.0%} of the texts' tokens"
    return (
        f"{calibration['name']} for {model}: {calibration['samples']:,} samples, {calibration['tokens']:,} tokens; "
        f"{cut if count else 'no sample was cut'}"
    )
