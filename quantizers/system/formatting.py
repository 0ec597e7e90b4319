"""Text for people: byte sizes, shares, plain tables, short paths, and many similar lines as one."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from decimal import Decimal
from pathlib import Path

from .errors import InputError

# Line ends, characters that steer a terminal or turn its text around, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text in one line for a terminal: what would not be printed is written as an escape."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose columns are left-aligned with spaces, under a line of dashes.

    Not rich's Table, which wraps and cuts to the width of the terminal: a result is piped, pasted and compared.
    """
    text = [[printable(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def several(count: int, what: str) -> str:
    """A number of things: `1 draw`, `2,000 draws`."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def size(number: int) -> str:
    """Bytes in decimal units, such as `131.8 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number} B"


def size_between(least: int, most: int) -> str:
    """The largest size up to `most` bytes with so few digits as are needed to be at least `least`, such as `74.2GB`.

    For a recipe or an option: `parse_bytes` reads it.
    """
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    unit, factor = next((pair for pair in units if most >= pair[1]), ("B", 1))
    steps = (factor // 10**digits for digits in range(1, 10) if factor >= 10**digits)
    step = next((step for step in steps if most // step * step >= least), 1)
    return f"{Decimal(most // step * step) / factor:f}{unit}"


def size_from(least: int) -> str:
    """The smallest size of at least `least` bytes with one decimal, such as `65.1GB`."""
    factor = next((power for power in (10**9, 10**6, 10**3) if least >= power), 10)
    return size_between(least, -(-least * 10 // factor) * factor // 10)


def percent(share: float) -> str:
    """A share in per cent with three digits and no exponent: `0.00149%`, `12.5%`, `0%`."""
    if not share:
        return "0%"
    digits = max(0, 2 - math.floor(math.log10(abs(100 * share))))
    text = f"{100 * share:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text}%"


def number(value: float | None, form: str) -> str:
    """A number of a report, formatted; None stands for NaN or infinity, see `json_finite`."""
    return "no number" if value is None else format(value, form)


_FACTORS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "b": 1}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str, what: str) -> int:
    """Bytes of `96GiB` (powers of 1024) or `96GB` (powers of 1000), in upper or lower case.

    Stricter than pydantic.ByteSize, which would read `1,000GiB` as 1 byte, `120` as 120 bytes and `8gbit` as bits.

    Raises:
        InputError: `what`, an option or key, is not a size, less than one byte, or more than a float can hold.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= size < math.inf:
        raise InputError(what, f"{text!r} is not a size", "write it as 96GiB or 96GB")
    return int(size)


def gib(number: float) -> str:
    """Bytes in GiB with one decimal, such as `61.4 GiB`; in MiB below 128 MiB."""
    return f"{number / 2**30:.1f} GiB" if abs(number) >= 2**27 else f"{number / 2**20:,.1f} MiB"


def short_path(path: str | Path) -> str:
    """The path relative to the current folder where that is shorter; what is not an absolute path stays as it is."""
    given = str(path)
    if not os.path.isabs(given):
        return given
    relative = os.path.relpath(given)
    return relative if len(relative) < len(given) else given


_PLACE = re.compile(r"\b((?:\w+\.)*?layers)\.(\d+)\.|\b(experts)\.(\d+)\b")
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:,\d{3})*(?:\.\d+)?%?(?!\w)")
FEW = 3  # from so many lines on they are joined
NAMES = 3  # different names that are listed before the rest is counted


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as they are listed in a text: `0–61`, or `0–3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)


def places(names: Sequence[str]) -> str:
    """Many names of tensors or modules as one: `layers 0–61, experts 0–255: mlp.experts.*.w1`."""
    if len(names) == 1:
        return names[0]
    patterns = list(dict.fromkeys(_pattern(name) for name in names))
    shown = ", ".join(patterns[:NAMES])
    more = f" and {len(patterns) - NAMES:,} more" if len(patterns) > NAMES else ""
    return f"{_where(names)}{shown}{more}"


def collapse_lines(lines: Collection[str]) -> list[str]:
    """Lines that each start with a tensor's name, FEW or more of one cause joined into one that counts them.

    Other numbers that differ between the joined lines are given as `least to most`.
    """
    groups: dict[str, list[str]] = {}
    for line in lines:
        pattern = _pattern(line)
        key = line if pattern == line else _NUMBER.sub("0", pattern)
        groups.setdefault(key, []).append(line)
    return [line for group in groups.values() for line in (group if len(group) < FEW else [_joined(group)])]


def _joined(group: Sequence[str]) -> str:
    texts = [_pattern(line) for line in group]
    spans = map(_span, zip(*(_NUMBER.findall(text) for text in texts), strict=True))
    text = _NUMBER.sub(lambda _: next(spans), texts[0])
    return f"{_where(group)}{text} ({len(group):,} times)"


def _span(column: Sequence[str]) -> str:
    """A number of several lines: as it is where it is always the same."""
    ordered = sorted(set(column), key=lambda text: float(text.rstrip("%").replace(",", "")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _pattern(text: str) -> str:
    """The text without the numbers of layers and experts."""
    return _PLACE.sub(lambda match: "" if match[1] else f"{match[3]}.*", text)


def _where(texts: Iterable[str]) -> str:
    """`layers 0–61, experts 0–255: `, of the first layer and expert that each text names."""
    layers: set[int] = set()
    experts: set[int] = set()
    for text in texts:
        matches = list(_PLACE.finditer(text))
        layers.update(int(match[2]) for match in matches[:1] if match[1])
        experts.update(int(match[4]) for match in matches[:2] if match[3])
    named = (("layer", layers), ("expert", experts))
    parts = [f"{word}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}" for word, numbers in named if numbers]
    return f"{', '.join(parts)}: " if parts else ""
