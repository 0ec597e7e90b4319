"""A subsample of a loaded set: a number of tokens, drawn evenly over its categories.

Every category gets the same share; what a small category lacks is divided evenly among the others. Within a category
whole samples are drawn until the share is reached, and the last one is truncated. Their order depends only on the
set's seed, the category's name and its number of samples, so a larger subsample contains the smaller one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from .samples import CalibrationData, Drawn, Sample, digest_of
from .set import seeded


def shares(available: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Tokens to draw from each category: the same number each, or all that it has.

    They add up to `tokens`, or to everything if that is less. The remainder of the division goes to the largest ones.

    Args:
        available: tokens of each category.
    """
    left = min(tokens, sum(available.values()))
    given = {}
    smallest_first = sorted(available, key=lambda name: (available[name], name))
    for number, name in enumerate(smallest_first):
        given[name] = min(available[name], left // (len(available) - number))
        left -= given[name]
    return given


def subsample(data: CalibrationData, tokens: int, seed: int) -> CalibrationData:
    """`data` with `tokens` tokens of its samples, in the set's order; the digest is that of the drawn samples.

    A cut sample has at least one token, and `truncated` counts what it lost. A set that holds no more than `tokens` is
    used whole, and says so in its notes if it holds fewer.

    Args:
        tokens: at least 1.
        seed: the set's own.
    """
    categories: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(data.samples):
        categories[sample.category].append(index)
    lengths = [len(sample.tokens) for sample in data.samples]
    total = sum(lengths)
    given = shares({name: sum(lengths[index] for index in members) for name, members in categories.items()}, tokens)
    kept: dict[int, int] = {}
    for name, members in categories.items():
        seeded(f"{seed}:draw:{name}").shuffle(members)
        left = given[name]
        for index in members:
            if not left:
                break
            kept[index] = min(lengths[index], left)
            left -= kept[index]
    samples = tuple(_truncated(data.samples[index], length) for index, length in sorted(kept.items()))
    cut = sum(length < lengths[index] for index, length in kept.items())
    notes = data.notes
    if total < tokens:
        notes += (f"{data.name} holds fewer than calibration.tokens, {total:,} of {tokens:,}: all are used",)
    drawn = Drawn(tokens, len(data.samples), total, cut)
    return replace(data, samples=samples, digest=digest_of(samples), notes=notes, drawn=drawn)


def _truncated(sample: Sample, length: int) -> Sample:
    """The sample cut to `length` tokens."""
    lost = len(sample.tokens) - length
    return replace(sample, tokens=sample.tokens[:length], truncated=sample.truncated + lost) if lost else sample
