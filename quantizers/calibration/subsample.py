"""A subsample of a loaded set: a number of tokens, drawn evenly over its categories.

Every category gets the same share. What a category with fewer tokens leaves of its share goes to the others, evenly
again. Within a category the samples come in an order that depends on nothing but the set's seed and the category's name
and number of samples: whole ones until the share is reached, the last one cut to what is left. So with a larger number
of tokens the same samples come again, and more of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from .samples import CalibrationData, Drawn, Sample, digest_of
from .set import seeded


def shares(held: Mapping[str, int], tokens: int) -> dict[str, int]:
    """How many tokens each category gives: the same number each, or all that it holds.

    They add up to `tokens`, or to everything if that is less. Tokens that cannot be divided evenly go to the categories
    that hold most.

    Args:
        held: tokens of each category.
    """
    left = min(tokens, sum(held.values()))
    given = {}
    smallest_first = sorted(held, key=lambda name: (held[name], name))
    for number, name in enumerate(smallest_first):
        given[name] = min(held[name], left // (len(held) - number))
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
