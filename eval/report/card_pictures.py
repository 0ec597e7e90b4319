"""The card's two pictures: what the model was calibrated on, and how many tokens the router sent to each expert.

The same report gives the same bytes: the files hold no date and no software name, and no display is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.system.own_files import CALIBRATION_PICTURE, COVERAGE_PICTURE

from .pictures import coverage_picture, save

BAR = "#3b6fb6"


def draw(report: dict[str, Any], folder: Path) -> None:
    """Write both pictures of a report into a folder."""
    save(calibration_figure(report["calibration"]), folder / CALIBRATION_PICTURE)
    coverage = report["coverage"]
    title = "routed tokens by layer and expert"
    coverage_picture(coverage["per_layer"], coverage["min_routed_tokens"], title, folder / COVERAGE_PICTURE)


def calibration_figure(calibration: dict[str, Any]) -> Any:
    """Samples by programming language, by spoken language, and by field, as bars."""
    from matplotlib.figure import Figure

    fields = {
        name: row["samples"]
        for name, row in calibration["categories"].items()
        if not name.startswith(("code/", "spoken/"))
    }
    panels = [
        ("programming languages", calibration["languages"]["programming"]),
        ("spoken languages", calibration["languages"]["spoken"]),
        ("other fields", fields),
    ]
    panels = [(title, counts) for title, counts in panels if counts] or [("samples", {"all": calibration["samples"]})]
    figure = Figure(figsize=(12, 3.1 * len(panels)), dpi=100, layout="constrained")
    figure.suptitle(f"{calibration['name']}: {calibration['samples']:,} samples, {calibration['tokens']:,} tokens")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, counts) in zip(axes, panels, strict=True):
        names = sorted(counts, key=lambda name: (-counts[name], name))
        axis.bar(range(len(names)), [counts[name] for name in names], color=BAR, width=0.8)
        axis.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        axis.set_xlim(-0.6, max(8, len(names)) - 0.4)
        axis.set_ylabel("samples")
        axis.yaxis.get_major_locator().set_params(integer=True)
        axis.set_title(f"{title} ({len(names)})", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    return figure
