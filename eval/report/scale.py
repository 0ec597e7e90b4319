"""The scales that all pictures share, so that pictures of two runs can be laid side by side.

An expert's load is its routed tokens divided by those of an even load of its layer. Every heat map shows it, or the
ratio of two of them, on the same logarithmic scale from LOW to HIGH; what lies beyond takes the colour of the end.
"""

from __future__ import annotations

from collections.abc import Sequence

LOW, HIGH = 1 / 8, 8.0
MARKS = {1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1.0: "1", 2.0: "2", 4.0: "4", 8.0: "8"}
TICKS = 16  # layers or experts that get a tick label, at most

# For lines and bars: Okabe and Ito, "Color Universal Design" (2008), without the yellow, which is pale on white.
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
UNCOVERED = "#d62728"  # always with a cross, so that it does not depend on the colour


def ticks(count: int) -> range:
    """At most TICKS of `count` positions, evenly spaced."""
    return range(0, count, max(1, -(-count // TICKS)))


def loads(tokens: Sequence[int]) -> list[float]:
    """The load of each expert of a layer, relative to an even one: 1 if all get the same."""
    total = sum(tokens)
    return [n * len(tokens) / total if total else 0.0 for n in tokens]
