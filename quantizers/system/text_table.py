"""Short plain tables for the end of a command."""

from __future__ import annotations

from collections.abc import Sequence


def plain(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned with spaces: first column left, the others by what they hold."""
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def size(number: int) -> str:
    """Bytes in decimal units: `131.8 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def number(value: float | None, form: str) -> str:
    """A figure of a report; null there is what JSON has no number for, see plain_json.py."""
    return "no number" if value is None else format(value, form)
