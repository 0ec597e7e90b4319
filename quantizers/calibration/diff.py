"""Differences between two calibration sets: of their YAML files, and of their loaded texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .samples import CalibrationData, Row, Sample, by_category, row_of
from .set import KINDS, CalibrationSet, DataSource, FromColumn, Kind, read_set

Change = tuple[Any, Any]  # before, after
COUNTS = {"texts": "samples", "tokens": "tokens"}  # here, and in samples.py


@dataclass(frozen=True)
class SetDiff:
    """The changes from one set's file to another's; parts without changes are empty.

    Attributes:
        settings: name, sequence_length, seed and languages.required, by key.
        languages: names of added and of removed languages, by kind.
        added, removed: sources as `dataset subset split`, with their number of samples.
        changed: for each source in both sets, the keys that differ.
        samples: number of samples by category; `all` if a source of the category takes all rows.
    """

    settings: dict[str, Change]
    languages: dict[Kind, tuple[list[str], list[str]]]
    added: dict[str, int | str]
    removed: dict[str, int | str]
    changed: dict[str, dict[str, Change]]
    samples: dict[str, Change]

    def __bool__(self) -> bool:
        return any(asdict(self).values())


@dataclass(frozen=True)
class TextsDiff:
    """The changes from one loaded set to another.

    Texts are equal if their words are, regardless of category, source and template; duplicates count separately.

    Attributes:
        tokenizer: the folder or Hub id of the model whose tokenizer counted the tokens.
        texts, tokens: of the whole sets.
        categories: texts and tokens of each category in which one of the two differs, by name.
        gained, lost: place, category and tokens of each text that only the second, or only the first set has, in order.
    """

    tokenizer: str
    texts: Change
    tokens: Change
    categories: dict[str, dict[str, Change]]
    gained: tuple[dict[str, Any], ...]
    lost: tuple[dict[str, Any], ...]

    def __bool__(self) -> bool:
        return bool(self.categories or self.gained or self.lost)


def diff_sets(before: Path, after: Path) -> SetDiff:
    """Compare the files of two sets. Two sources are the same if dataset, subset and split are equal.

    Raises:
        CalibrationError: one of the sets is wrong.
    """
    sets = read_set(before), read_set(after)
    old, new = map(_by_name, sets)
    both = [name for name in old if name in new]
    changed = {name: _changes(old[name].model_dump(), new[name].model_dump()) for name in both}
    return SetDiff(
        settings=_changes(*map(_settings, sets)),
        languages=_languages(*sets),
        added={name: new[name].samples for name in _without(new, old)},
        removed={name: old[name].samples for name in _without(old, new)},
        changed={name: changes for name, changes in changed.items() if changes},
        samples=_changes(*map(_category_samples, sets)),
    )


def diff_texts(old: CalibrationData, new: CalibrationData, tokenizer: str) -> TextsDiff:
    """Compare two sets that were loaded with the same tokenizer."""
    before, after, none = by_category(old), by_category(new), row_of(())

    def change(first: Row, second: Row) -> dict[str, Change]:
        return {key: (first[count], second[count]) for key, count in COUNTS.items()}

    changes = {name: change(before.get(name, none), after.get(name, none)) for name in sorted({*before, *after})}
    return TextsDiff(
        tokenizer=tokenizer,
        **change(row_of(old.samples), row_of(new.samples)),
        categories={name: row for name, row in changes.items() if any(old != new for old, new in row.values())},
        gained=_missing_in(old.samples, new.samples),
        lost=_missing_in(new.samples, old.samples),
    )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Change]:
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _settings(calibration: CalibrationSet) -> dict[str, Any]:
    settings = calibration.model_dump(exclude={"sources", "languages"})
    return settings | {"languages.required": calibration.languages.required}


def _languages(old: CalibrationSet, new: CalibrationSet) -> dict[Kind, tuple[list[str], list[str]]]:
    lists = {kind: (old.languages.of(kind), new.languages.of(kind)) for kind in KINDS}
    changes = {kind: (_without(after, before), _without(before, after)) for kind, (before, after) in lists.items()}
    return {kind: change for kind, change in changes.items() if any(change)}


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    return [name for name in names if name not in others]


def _by_name(calibration: CalibrationSet) -> dict[str, DataSource]:
    """Sources by what they read; a second source that reads the same is called `… (2)`."""
    counts: Counter[str] = Counter()
    sources = {}
    for source in calibration.sources:
        name = " ".join(part for part in (source.dataset, source.subset, source.split) if part)
        counts[name] += 1
        sources[name if counts[name] == 1 else f"{name} ({counts[name]})"] = source
    return sources


def _category_samples(calibration: CalibrationSet) -> dict[str, Any]:
    """The number of samples of each category, or `all`."""
    totals: dict[str, Any] = {}
    for source in calibration.sources:
        category = source.category
        name = f"column {category.column}" if isinstance(category, FromColumn) else category
        before = totals.get(name, 0)
        totals[name] = "all" if "all" in (before, source.samples) else before + source.samples
    return totals


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
