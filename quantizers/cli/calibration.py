"""`quantize calibration`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantizers.system.errors import InputError

from .options import GATE_FAILED, DebugOption, JsonOption, show_rich


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

    from .calibration_sets import check_calibration, diff_calibration, lock_calibration

    verb, *sets = words
    if verb == "lock" and len(sets) == 1:
        report, shown = lock_calibration(sets[0], workers)
    elif verb == "diff" and len(sets) == 2:
        report, shown = diff_calibration(*sets)
    elif not sets:
        model = tokenizer or str(shipped("models") / "tiny-minimax-m2")
        report, shown = check_calibration(verb, model, held_out, show, workers)
    else:
        raise InputError(f"calibration {' '.join(words)}: give SET, `lock SET`, or `diff SET SET`")
    show_rich(report, as_json, shown)
    if not report.get("ok", True):
        raise typer.Exit(GATE_FAILED)
