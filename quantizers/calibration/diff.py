"""Differences between two calibration sets: of their YAML files, and of their loaded texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .samples import CalibrationData, Row, Sample, by_category, row_of
from .set import KINDS, CalibrationSet, read_set

Change = tuple[Any, Any]  # before, after
SETTINGS = "set"  # the entry of a file that has its keys at the top


@dataclass(frozen=True)
class SetDiff:
    """The changes from one set's file to another's.

    Sources are named by dataset, subset and split, languages by kind and name.

    Attributes:
        added, removed: the keys of each source or language that only one of the files has; a language has none.
        changed: for each source in both, and for the `set` itself, the keys that differ.
    """

    added: dict[str, dict[str, Any]]
    removed: dict[str, dict[str, Any]]
    changed: dict[str, dict[str, Change]]

    def __bool__(self) -> bool:
        return any(asdict(self).values())


@dataclass(frozen=True)
class TextsDiff:
    """The changes from one loaded set to another.

    Texts are equal if their words are, regardless of category, source and template; duplicates count separately.

    Attributes:
        tokenizer: the folder or Hub id of the model whose tokenizer counted the tokens.
        total: counts of the whole sets, see `row_of`.
        categories: the same of each category in which one of them differs, by name.
        gained, lost: place, category and tokens of each text that only the second, or only the first set has, in order.
    """

    tokenizer: str
    total: tuple[Row, Row]
    categories: dict[str, tuple[Row, Row]]
    gained: tuple[dict[str, Any], ...]
    lost: tuple[dict[str, Any], ...]

    def __bool__(self) -> bool:
        return bool(self.categories or self.gained or self.lost)


def diff_sets(before: Path, after: Path) -> SetDiff:
    """Compare the files of two sets. Two sources are the same if dataset, subset and split are equal.

    Raises:
        CalibrationError: one of the sets is wrong.
    """
    old, new = _entries(read_set(before)), _entries(read_set(after))
    changes = {
        name: {key: (value, new[name][key]) for key, value in keys.items() if value != new[name][key]}
        for name, keys in old.items()
        if name in new
    }
    return SetDiff(
        added={name: keys for name, keys in new.items() if name not in old},
        removed={name: keys for name, keys in old.items() if name not in new},
        changed={name: change for name, change in changes.items() if change},
    )


def _entries(calibration: CalibrationSet) -> dict[str, dict[str, Any]]:
    """The keys of the set, of its languages and of its sources; a second source of one name is called `… (2)`."""
    settings = calibration.model_dump(exclude={"sources", "languages"})
    entries = {SETTINGS: settings | {"languages.required": calibration.languages.required}}
    entries |= {f"{kind} {name}": {} for kind in KINDS for name in calibration.languages.of(kind)}
    counts: Counter[str] = Counter()
    for source in calibration.sources:
        name = " ".join(filter(None, (source.dataset, source.subset, source.split)))
        counts[name] += 1
        entries[name if counts[name] == 1 else f"{name} ({counts[name]})"] = source.model_dump()
    return entries


def diff_texts(old: CalibrationData, new: CalibrationData, tokenizer: str) -> TextsDiff:
    """Compare two sets that were loaded with the same tokenizer."""
    before, after, none = by_category(old), by_category(new), row_of(())
    rows = {name: (before.get(name, none), after.get(name, none)) for name in sorted({*before, *after})}
    return TextsDiff(
        tokenizer=tokenizer,
        total=(row_of(old.samples), row_of(new.samples)),
        categories={name: (first, second) for name, (first, second) in rows.items() if first != second},
        gained=_missing_in(old.samples, new.samples),
        lost=_missing_in(new.samples, old.samples),
    )


def _missing_in(others: Iterable[Sample], samples: Iterable[Sample]) -> tuple[dict[str, Any], ...]:
    """Those of `samples` whose text `others` do not have, or do not have as often."""
    available = Counter(sample.text for sample in others)
    missing = []
    for sample in samples:
        if available[sample.text]:
            available[sample.text] -= 1
        else:
            missing.append({"place": sample.place, "category": sample.category, "tokens": len(sample.tokens)})
    return tuple(missing)
