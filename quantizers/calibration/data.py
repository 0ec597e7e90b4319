"""A loaded calibration set: its samples, and a record of where they came from and what was dropped."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .set import KINDS, CalibrationSet, Kind


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Attributes:
        tokens: int32 (T,), 2 <= T <= its source's sequence_length; 1 <= T if it was cut by a draw.
        category: such as `code/rust`, `spoken/hindi`, `math`.
        source: the dataset it comes from.
        truncated: how many tokens were cut off.
        long: whether its source's sequence_length is larger than the set's.
        languages: which of the set's languages it shows: assigned to it, or named by its category.
        dealt: whether a language was assigned to it by a prompt; its text need not be in that language.
        place: where its row is, such as `./texts.jsonl:12`; paths are relative to the set's folder.
        text: its words without the chat template, not truncated.
    """

    tokens: NDArray[np.int32]
    category: str
    source: str
    truncated: int = 0
    long: bool = False
    languages: tuple[str, ...] = ()
    dealt: bool = False
    place: str = ""
    text: str = ""


@dataclass(frozen=True)
class Dropped:
    """How many rows of one source were skipped for the same reason.

    Attributes:
        first: the place of the first one.
        left_out: whether they could be used, but name a language that is not in the set's lists.
    """

    source: str
    reason: str
    count: int
    first: str
    left_out: bool = False


@dataclass(frozen=True)
class Drawn:
    """What was drawn from a set, see draw.py.

    Attributes:
        asked: the number of tokens asked for.
        samples, tokens: what the whole set holds.
        cut: how many samples were cut because their category's share was used up.
    """

    asked: int
    samples: int
    tokens: int
    cut: int


@dataclass(frozen=True)
class CalibrationData:
    """A set loaded with one tokenizer.

    Attributes:
        sequence_length: the set's own, used by sources that give none.
        lengths: all token limits at which samples were truncated, ascending, see `CalibrationSet.lengths`.
        samples: in the set's order of sources, and within a source in the order in which they were taken.
        digest: see `digest_of`.
        dropped: all skipped rows, by source and reason.
        versions: for each source, the commit or file hash that was read.
        lock: whether the versions come from the set's lock.
        notes: what a user should know, such as that the data comes from the cache because the Hub was unreachable.
        drawn: how the samples were drawn from the set; None if they are all of it.
    """

    name: str
    sequence_length: int
    lengths: tuple[int, ...]
    samples: tuple[Sample, ...]
    digest: str
    dropped: tuple[Dropped, ...]
    versions: tuple[str, ...]
    lock: bool = False
    notes: tuple[str, ...] = ()
    drawn: Drawn | None = None

    def summary(self) -> dict[str, Any]:
        """Everything except the samples themselves, for report.json."""
        return {
            "name": self.name,
            "digest": self.digest,
            "sequence_length": self.sequence_length,
            "lengths": list(self.lengths),
            "samples": len(self.samples),
            "tokens": sum(len(sample.tokens) for sample in self.samples),
            "long_samples": sum(sample.long for sample in self.samples),
            "long_tokens": sum(len(sample.tokens) for sample in self.samples if sample.long),
            "truncated_samples": sum(sample.truncated > 0 for sample in self.samples),
            "truncated_tokens": sum(sample.truncated for sample in self.samples),
            "categories": dict(sorted(Counter(sample.category for sample in self.samples).items())),
            "dropped": [asdict(dropped) for dropped in self.dropped],
            "versions": list(self.versions),
            "lock": self.lock,
            "notes": list(self.notes),
        } | ({"drawn": asdict(self.drawn)} if self.drawn else {})


def digest_of(samples: Iterable[Sample]) -> str:
    """SHA-256, hexadecimal, over each sample's category, length and token ids (int32, little-endian), in order.

    For a long text it also covers the word `long`, because reported figures depend on which texts are long.
    """
    digest = hashlib.sha256()
    for sample in samples:
        long = "long\0" if sample.long else ""
        digest.update(f"{sample.category}\0{len(sample.tokens)}\0{long}".encode())
        digest.update(sample.tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def language_counts(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, dict[str, int]]:
    """How many samples show each language of the set's lists, in the lists' order."""
    counts = Counter(name for sample in samples for name in sample.languages)
    return {kind: {name: counts[name] for name in calibration.languages.of(kind)} for kind in KINDS}


def missing_languages(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, list[str]]:
    """The languages of the set's lists that no sample shows."""
    counts = language_counts(calibration, samples)
    return {kind: [name for name, count in counts[kind].items() if not count] for kind in KINDS}
