"""Short plain tables and figures for the output of commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

SHARES = ("perplexity", "coverage")  # gates whose values are shares


def plain(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose columns are left-aligned with spaces, under a line of dashes.

    Not rich's Table, which wraps and cuts to the width of the terminal: a result is piped, pasted and compared.
    """
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def size(number: int) -> str:
    """Bytes in decimal units, such as `131.8 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def gate_figures(gate: dict[str, Any]) -> tuple[str, str]:
    """A gate's value and its limit as people read them: shares in per cent, anything else as a number."""
    share = gate["name"].partition(" ")[0] in SHARES
    bound = ">=" if gate.get("at_least") else "<="
    if share:
        value = "no number" if gate["value"] is None else percent(gate["value"])
        return value, f"{bound} {percent(gate['limit'])}"
    return number(gate["value"], ".4g"), f"{bound} {gate['limit']:.4g}"


def percent(share: float) -> str:
    """A share in per cent with three digits and no exponent: `0.00149%`, `12.5%`, `0%`."""
    if not share:
        return "0%"
    digits = max(0, 2 - math.floor(math.log10(abs(100 * share))))
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def number(value: float | None, form: str) -> str:
    """A number of a report, formatted; None stands for NaN or infinity, see plain_json.py."""
    return "no number" if value is None else format(value, form)
