"""Samples and tokens of a loaded set by category or language, and how much of them was cut off."""

from __future__ import annotations

from collections.abc import Iterable

from .data import CalibrationData, Sample
from .set import KINDS, CalibrationSet, Kind

Row = dict[str, int]  # samples, tokens, truncated (samples), truncated_tokens


def row_of(samples: Iterable[Sample]) -> Row:
    """The four numbers of some samples; tokens are those that are left."""
    chosen = list(samples)
    return {
        "samples": len(chosen),
        "tokens": sum(len(sample.tokens) for sample in chosen),
        "truncated": sum(sample.truncated > 0 for sample in chosen),
        "truncated_tokens": sum(sample.truncated for sample in chosen),
    }


def by_category(data: CalibrationData) -> dict[str, Row]:
    """A row for each category, sorted by name."""
    names = sorted({sample.category for sample in data.samples})
    return {name: row_of(sample for sample in data.samples if sample.category == name) for name in names}


def by_language(calibration: CalibrationSet, data: CalibrationData) -> dict[Kind, dict[str, Row]]:
    """A row for each language of the set's lists, in the lists' order; a sample that shows two counts in both."""
    return {
        kind: {
            name: row_of(sample for sample in data.samples if name in sample.languages)
            for name in calibration.languages.of(kind)
        }
        for kind in KINDS
    }
