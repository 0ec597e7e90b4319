"""Licences of a set's texts, and which of them forbid commercial use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from .samples import CalibrationData
from .set import CalibrationSet

_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|research[- ]only", re.IGNORECASE)


def is_non_commercial(licence: str) -> bool:
    """Whether a licence forbids commercial use, by its name."""
    return _NON_COMMERCIAL.search(licence) is not None


def used_licences(calibration: CalibrationSet, data: CalibrationData) -> dict[str, str]:
    """The licence of each data set that samples were taken from, by its name."""
    used = {sample.source for sample in data.samples}
    pairs = zip(calibration.sources, data.licences, strict=True)
    return {source.dataset: licence for source, licence in pairs if source.dataset in used}


def in_words(licences: Mapping[str, str]) -> Iterable[str]:
    """How many data sets have which licence, and which of them are not for commercial use; a line each.

    Args:
        licences: by data set, see `used_licences`.
    """
    counts = Counter(sorted(licence or "unknown" for licence in licences.values())).most_common()
    yield f"licences: {', '.join(f'{licence} ({count})' for licence, count in counts)}"
    if restricted := [f"{name} ({licence})" for name, licence in licences.items() if is_non_commercial(licence)]:
        yield f"not for commercial use: {', '.join(restricted)}"
