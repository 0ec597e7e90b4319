"""What `quantize calibration` does, apart from parsing: a report for --json, and what is shown without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .calibration.cache import default_cache
from .calibration.diff import diff_sets
from .calibration.lock import lock_set
from .calibration.report import check_set
from .calibration.view import loading, render, render_diff, render_samples, show_samples
from .errors import CalibrationError
from .shipped import find


def find_set(name: str) -> Path:
    """A set by its path, or by the name of a shipped one.

    Raises:
        CalibrationError: there is none.
    """
    path = find(name, "calibration")
    if not path.is_file():
        raise CalibrationError(f"{name}: no such set; give a file, or the name of a shipped set such as embedded")
    return path


def check_calibration(
    name: str, tokenizer: str, held_out: Path | None, show: int, workers: int
) -> tuple[dict[str, Any], Any]:
    """Load a set, look at it, and render `show` of its samples."""
    from rich.console import Console, Group

    path = find_set(name)
    with loading(Console(stderr=True)) as progress:
        report = check_set(path, tokenizer, held_out, workers=workers, progress=progress, cache=default_cache())
    if not show:
        return report.as_json(), render(report)
    shown = show_samples(path, show, tokenizer, cache=default_cache())
    return report.as_json() | {"samples": [vars(s) for s in shown]}, Group(render(report), render_samples(shown))


def lock_calibration(name: str, workers: int) -> tuple[dict[str, Any], Any]:
    """Write the lock beside a set."""
    written = lock_set(find_set(name), workers=workers)
    return {"lock": str(written)}, f"wrote {written}"


def diff_calibration(before: str, after: str) -> tuple[dict[str, Any], Any]:
    """Compare two sets."""
    difference = diff_sets(find_set(before), find_set(after))
    return difference.as_json(), render_diff(difference)
