"""Charts for the report's page as inline SVG: a heat map, lines and bars. Plain strings: no library, no web request.

Colours are CSS classes and variables of the page, so they follow its light or dark scheme. Every mark has a
<title>, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from .scale import HIGH, LOW, MARKS, loads, ticks

VIRIDIS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
SCALE, LEAST_SCALE, STEPS = 86, 110, 48  # the colour scale's place beside a heat map, its least height, its colours


def heat_map(tokens: Mapping[int, Sequence[int]], minimum: int) -> str:
    """A grid of layers by experts, coloured by the load, with its scale; red with a cross below the minimum.

    Args:
        tokens: for each layer with experts, by its number, the routed tokens of each expert.
        minimum: routed tokens that an expert needs to count as covered.
    """
    layers, experts = len(tokens), len(next(iter(tokens.values())))
    right = WIDTH - RIGHT - SCALE
    wide = (right - LEFT) / experts
    high = max(6.0, min(wide, 24.0))
    marks = []
    for place, (layer, row) in enumerate(tokens.items()):
        for expert, (count, load) in enumerate(zip(row, loads(row), strict=True)):
            x, y = LEFT + expert * wide, TOP + place * high
            tip = f"<title>layer {layer}, expert {expert}: {count:,} tokens, {load:.2f} of even</title>"
            box = f'x="{x:.1f}" y="{y:.1f}" width="{wide + 0.2:.1f}" height="{high + 0.2:.1f}"'
            if count < max(minimum, 1):
                marks.append(f'<rect class="bare" {box}>{tip}</rect>')
                cross = f"M{x:.1f} {y:.1f}l{wide:.1f} {high:.1f}m0 {-high:.1f}l{-wide:.1f} {high:.1f}"
                marks.append(f'<path class="cross" d="{cross}"/>')
            else:
                marks.append(f'<rect fill="{colour(along(load))}" {box}>{tip}</rect>')
    grid = max(layers * high, LEAST_SCALE)
    bottom = TOP + grid
    expert_labels = "".join(_text(LEFT + (i + 0.5) * wide, TOP + layers * high + 14, str(i)) for i in ticks(experts))
    numbers = list(tokens)
    layer_labels = "".join(_text(LEFT - 6, TOP + (i + 0.5) * high + 4, str(numbers[i]), "end") for i in ticks(layers))
    axes = _text((right + LEFT) / 2, TOP + layers * high + 29, "expert") + _text(14, TOP + layers * high / 2, "layer")
    labels = expert_labels + layer_labels + axes
    return _svg(bottom + BOTTOM, "".join(marks) + labels + _scale(right + 24, grid))


def _scale(x: float, height: float) -> str:
    """A bar with the colours from LOW (below) to HIGH, and its marks."""
    step = height / STEPS
    bar = (
        f'<rect fill="{colour((i + 0.5) / STEPS)}" x="{x:.1f}" y="{TOP + height - (i + 1) * step:.2f}" width="12" '
        f'height="{step + 0.3:.2f}"/>'
        for i in range(STEPS)
    )
    marks = (_text(x + 17, TOP + height * (1 - along(n)) + 4, words, "start") for n, words in MARKS.items())
    return "".join([*bar, *marks, _text(x - 6, TOP + height + 18, "tokens / even", "start")])


def along(load: float) -> float:
    """Where a load lies on the scale from LOW (0) to HIGH (1); beyond them at its ends."""
    return min(max(math.log(load / LOW) / math.log(HIGH / LOW), 0.0), 1.0) if load > 0 else 0.0


def colour(share: float) -> str:
    """The colour of the viridis map for a share from 0 to 1, as #rrggbb."""
    at = min(max(share, 0.0), 1.0) * (len(VIRIDIS) - 1)
    i = min(int(at), len(VIRIDIS) - 2)
    mixed = (round(a + (b - a) * (at - i)) for a, b in zip(VIRIDIS[i], VIRIDIS[i + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def lines(series: Mapping[str, Sequence[float | None]], unit: str) -> str:
    """A line over the layers for each named series; the y axis starts at 0, and None values are skipped."""
    count = max(len(values) for values in series.values())
    top = _rounded(max((v for values in series.values() for v in values if v is not None), default=0.0) or 1.0)
    height, width = 220, WIDTH - LEFT - RIGHT

    def place(i: int, value: float) -> tuple[float, float]:
        return LEFT + (width * i / (count - 1) if count > 1 else width / 2), TOP + height * (1 - value / top)

    parts = [_grid(top, height)]
    for number, (name, values) in enumerate(series.items()):
        points = [(i, *place(i, v), v) for i, v in enumerate(values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for _, x, y, _ in points)
        parts.append(f'<polyline class="line s{number % 6}" points="{path}"/>')
        parts += [
            f'<circle class="dot s{number % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{escape(name)}, layer {i}: {v:.4g}</title></circle>"
            for i, x, y, v in points
        ]
    layer_labels = "".join(_text(place(i, 0)[0], TOP + height + 15, str(i)) for i in ticks(count))
    axis_title = _text((WIDTH + LEFT) / 2, TOP + height + 30, f"{unit}, by layer")
    return _svg(TOP + height + BOTTOM, "".join(parts) + layer_labels + axis_title) + _legend(list(series))


def _rounded(top: float) -> float:
    """The next number up whose quarters are short, for the end of an axis."""
    power = 10.0 ** math.floor(math.log10(top))
    return next(n * power for n in (1, 2, 4, 6, 8, 10) if n * power >= top * (1 - 1e-9))


def _grid(top: float, height: float) -> str:
    parts = []
    for step in range(5):
        y = TOP + height * step / 4
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{top * (1 - step / 4):.2g}", "end"))
    return "".join(parts)


def bars(values: Mapping[str, tuple[float, tuple[float, float] | None]], unit: str) -> str:
    """A horizontal bar for each name, with a whisker for its interval if it has one."""
    left, row = 170, 18
    top = max(max(value, *interval) if interval else value for value, interval in values.values()) or 1.0
    width = WIDTH - left - 90
    parts = []
    for number, (name, (value, interval)) in enumerate(values.items()):
        y = TOP + number * row
        parts.append(_text(left - 6, y + 12, name, "end"))
        parts.append(
            f'<rect class="bar" x="{left}" y="{y + 2}" width="{width * value / top:.1f}" height="{row - 5}">'
            f"<title>{escape(name)}: {value:.5f}</title></rect>"
        )
        end = left + width * value / top
        if interval:
            a, b = (left + width * v / top for v in interval)
            parts.append(f'<path class="whisker" d="M{a:.1f} {y + 8.5:.1f}H{b:.1f}m0 -4v8M{a:.1f} {y + 4.5:.1f}v8"/>')
            end = max(end, b)
        parts.append(_text(end + 6, y + 12, f"{value:.4f}", "start"))
    bottom = TOP + len(values) * row
    return _svg(bottom + 24, "".join(parts) + _text((WIDTH + left) / 2, bottom + 16, unit))


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(height: float, inner: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{inner}</svg>'


def _legend(names: Sequence[str]) -> str:
    """Names beside their colours; a single line needs none."""
    if len(names) < 2:
        return ""
    items = (f'<span><i class="s{i % 6}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(items)}</p>'
