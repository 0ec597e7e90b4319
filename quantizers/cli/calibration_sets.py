"""The work of `quantize calibration`: each function returns a report for --json, and what is shown without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantizers.calibration.report.check import check_set
from quantizers.calibration.report.diff import diff_sets
from quantizers.calibration.report.view import loading, render, render_diff, render_samples, show_samples
from quantizers.calibration.sources.cache import default_cache
from quantizers.calibration.sources.lock import lock_set

from .options import find_set


def check_calibration(
    name: str, tokenizer: str, held_out: Path | None, show: int, workers: int
) -> tuple[dict[str, Any], Any]:
    """Load a set, check it, and render `show` of its samples."""
    from rich.console import Console, Group

    path = find_set(name, "embedded")
    with loading(Console(stderr=True)) as progress:
        report = check_set(path, tokenizer, held_out, workers=workers, progress=progress, cache=default_cache())
    if not show:
        return report.as_json(), render(report)
    shown = show_samples(path, show, tokenizer, cache=default_cache())
    return report.as_json() | {"samples": [vars(s) for s in shown]}, Group(render(report), render_samples(shown))


def lock_calibration(name: str, workers: int) -> tuple[dict[str, Any], Any]:
    """Write a set's lock file, beside the set."""
    written = lock_set(find_set(name, "embedded"), workers=workers)
    return {"lock": str(written)}, f"wrote {written}"


def diff_calibration(before: str, after: str) -> tuple[dict[str, Any], Any]:
    """Compare two sets."""
    difference = diff_sets(find_set(before, "embedded"), find_set(after, "embedded"))
    return difference.as_json(), render_diff(difference)
