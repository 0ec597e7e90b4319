"""Says once what is true of many layers and experts: `layers 0–61: …` in place of 62 lines.

Lines and names that differ only in the numbers behind `layers.` and `experts.` have one cause.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

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
    """Many names of tensors or modules as one: `layers 0–61, experts 0–255: mlp.experts.*.w1`.

    Args:
        names: in any order; names outside the layers are listed as they are.
    """
    if len(names) == 1:
        return names[0]
    patterns = list(dict.fromkeys(_pattern(name) for name in names))
    shown = ", ".join(patterns[:NAMES])
    more = f" and {len(patterns) - NAMES:,} more" if len(patterns) > NAMES else ""
    return f"{_where(names)}{shown}{more}"


def repeated(lines: Collection[str]) -> list[str]:
    """Lines, each starting with the name of a tensor, with those of one cause joined into one that counts them if there
    are at least FEW.

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
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    spans = iter([_span(column) for column in columns])
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
        found = list(_PLACE.finditer(text))
        layers.update(int(match[2]) for match in found[:1] if match[1])
        experts.update(int(match[4]) for match in found[:2] if match[3])
    named = [(word, numbers) for word, numbers in (("layer", layers), ("expert", experts)) if numbers]
    parts = [f"{word}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}" for word, numbers in named]
    return f"{', '.join(parts)}: " if parts else ""
