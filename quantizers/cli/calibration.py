"""`quantize calibration`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.system.errors import InputError

from .options import GATE_FAILED, DebugOption, JsonOption, find_set, show_rich


def calibration(
    *,
    words: Annotated[
        list[str],
        typer.Argument(metavar="SET | lock SET | diff SET SET", help="a set's file, or the name of a shipped one"),
    ],
    tokenizer: Annotated[str | None, typer.Option(help="a model's folder or Hub id; the tiny model by default")] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="a set that shares no text with it; held-out.yaml beside it by default")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="print this many rendered samples, evenly spread")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="sources loaded at the same time")] = 8,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Check what a calibration set holds; exit 3 when a language is missing or texts are duplicates.

    `lock SET` writes the exact version of every source beside the set; `diff SET SET` compares two.

    Example: quantize calibration embedded
    """
    from quantizers.system.shipped import shipped

    verb, *sets = words
    if verb == "lock" and len(sets) == 1:
        report, shown = _lock(sets[0], workers)
    elif verb == "diff" and len(sets) == 2:
        report, shown = _diff(*sets)
    elif not sets:
        model = tokenizer or str(shipped("models") / "tiny-minimax-m2")
        report, shown = _check(verb, model, held_out, show, workers)
    else:
        raise InputError(f"calibration {' '.join(words)}: give SET, `lock SET`, or `diff SET SET`")
    show_rich(report, as_json, shown)
    if not report.get("ok", True):
        raise typer.Exit(GATE_FAILED)


def _check(name: str, tokenizer: str, held_out: Path | None, show: int, workers: int) -> tuple[dict[str, Any], Any]:
    """Load a set, check it, and render `show` of its samples."""
    from rich.console import Console, Group

    from quantizers.calibration.report.check import check_set
    from quantizers.calibration.report.view import loading, render, render_samples, show_samples
    from quantizers.calibration.sources.cache import default_cache

    path = find_set(name, "embedded")
    with loading(Console(stderr=True)) as progress:
        report = check_set(path, tokenizer, held_out, workers=workers, progress=progress, cache=default_cache())
    if not show:
        return report.as_json(), render(report)
    shown = show_samples(path, show, tokenizer, cache=default_cache())
    return report.as_json() | {"samples": [vars(s) for s in shown]}, Group(render(report), render_samples(shown))


def _lock(name: str, workers: int) -> tuple[dict[str, Any], Any]:
    """Write a set's lock file, beside the set."""
    from quantizers.calibration.sources.lock import lock_set

    written = lock_set(find_set(name, "embedded"), workers=workers)
    return {"lock": str(written)}, f"wrote {written}"


def _diff(before: str, after: str) -> tuple[dict[str, Any], Any]:
    """Compare two sets."""
    from quantizers.calibration.report.diff import diff_sets
    from quantizers.calibration.report.view import render_diff

    difference = diff_sets(find_set(before, "embedded"), find_set(after, "embedded"))
    return difference.as_json(), render_diff(difference)
