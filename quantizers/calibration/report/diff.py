"""The differences between two calibration sets, from their YAML files alone; see texts_diff.py for their texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantizers.calibration.set import KINDS, CalibrationSet, DataSource, FromColumn, Kind, read_set

Change = tuple[Any, Any]  # before, after


@dataclass(frozen=True)
class SetDiff:
    """The changes from one set to another; parts without changes are empty.

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

    def as_json(self) -> dict[str, Any]:
        """The difference as one JSON object."""
        return asdict(self)


def diff_sets(before: Path, after: Path) -> SetDiff:
    """Compare two sets. Two sources are the same if dataset, subset and split are equal.

    Raises:
        CalibrationError: one of the sets is wrong.
    """
    old, new = read_set(before), read_set(after)
    old_sources, new_sources = _by_name(old), _by_name(new)
    return SetDiff(
        settings=_changes(_settings(old), _settings(new)),
        languages=_languages(old, new),
        added={name: s.samples for name, s in new_sources.items() if name not in old_sources},
        removed={name: s.samples for name, s in old_sources.items() if name not in new_sources},
        changed={
            name: changes
            for name in old_sources
            if name in new_sources
            and (changes := _changes(old_sources[name].model_dump(), new_sources[name].model_dump()))
        },
        samples=_changes(_by_category(old), _by_category(new)),
    )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Change]:
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _settings(calibration: CalibrationSet) -> dict[str, Any]:
    settings = calibration.model_dump(exclude={"sources", "languages"})
    return settings | {"languages.required": calibration.languages.required}


def _languages(old: CalibrationSet, new: CalibrationSet) -> dict[Kind, tuple[list[str], list[str]]]:
    changes = {}
    for kind in KINDS:
        before, after = old.languages.of(kind), new.languages.of(kind)
        added, removed = [n for n in after if n not in before], [n for n in before if n not in after]
        if added or removed:
            changes[kind] = (added, removed)
    return changes


def _by_name(calibration: CalibrationSet) -> dict[str, DataSource]:
    """Sources by what they read; a second source that reads the same is called `… (2)`."""
    counts: Counter[str] = Counter()
    sources = {}
    for source in calibration.sources:
        name = " ".join(part for part in (source.dataset, source.subset, source.split) if part)
        counts[name] += 1
        sources[name if counts[name] == 1 else f"{name} ({counts[name]})"] = source
    return sources


def _by_category(calibration: CalibrationSet) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for source in calibration.sources:
        given = source.category
        category = f"column {given.column}" if isinstance(given, FromColumn) else given
        before = totals.get(category, 0)
        countable = isinstance(before, int) and isinstance(source.samples, int)
        totals[category] = before + source.samples if countable else "all"
    return totals
