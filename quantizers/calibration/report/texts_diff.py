"""Which texts and how many tokens a set wins and loses against another: the sets are loaded, not only their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from quantizers.calibration.data import CalibrationData, Sample

Change = tuple[int, int]  # before, after


@dataclass(frozen=True)
class Text:
    """A text that only one of the sets has: its row's place, its category, and its tokens in that set."""

    place: str
    category: str
    tokens: int


@dataclass(frozen=True)
class TextsDiff:
    """The changes from one loaded set to another.

    A text is the same if its words are, whatever its category, source or template; a set that has it twice has two.

    Attributes:
        tokenizer: the folder or Hub id of the model whose tokenizer counted the tokens.
        texts, tokens: of the whole sets.
        categories: texts and tokens of each category in which one of the two differs, by name.
        gained, lost: texts that only the second, or only the first set has, in that set's order.
    """

    tokenizer: str
    texts: Change
    tokens: Change
    categories: dict[str, dict[str, Change]]
    gained: tuple[Text, ...]
    lost: tuple[Text, ...]

    def __bool__(self) -> bool:
        return bool(self.categories or self.gained or self.lost)

    def as_json(self) -> dict[str, Any]:
        """The difference as one JSON object."""
        return asdict(self)


def diff_texts(old: CalibrationData, new: CalibrationData, tokenizer: str) -> TextsDiff:
    """Compare two sets that were loaded with the same tokenizer."""
    before, after = _by_category(old.samples), _by_category(new.samples)
    none = {"texts": 0, "tokens": 0}
    categories = {
        name: {key: (before.get(name, none)[key], after.get(name, none)[key]) for key in none}
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }
    return TextsDiff(
        tokenizer=tokenizer,
        texts=(len(old.samples), len(new.samples)),
        tokens=(_tokens(old.samples), _tokens(new.samples)),
        categories=categories,
        gained=_missing_in(old.samples, new.samples),
        lost=_missing_in(new.samples, old.samples),
    )


def _tokens(samples: Iterable[Sample]) -> int:
    return sum(len(sample.tokens) for sample in samples)


def _by_category(samples: Iterable[Sample]) -> dict[str, dict[str, int]]:
    groups: dict[str, dict[str, int]] = {}
    for sample in samples:
        counts = groups.setdefault(sample.category, {"texts": 0, "tokens": 0})
        counts["texts"] += 1
        counts["tokens"] += len(sample.tokens)
    return groups


def _missing_in(others: Iterable[Sample], samples: Iterable[Sample]) -> tuple[Text, ...]:
    """Those of `samples` whose text `others` do not have, or do not have as often."""
    available = Counter(sample.text for sample in others)
    missing = []
    for sample in samples:
        if available[sample.text]:
            available[sample.text] -= 1
        else:
            missing.append(Text(sample.place, sample.category, len(sample.tokens)))
    return tuple(missing)
