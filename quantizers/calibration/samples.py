"""Samples of a loaded calibration set: their tokens, where they came from, what was dropped, and their counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantizers.system.errors import CalibrationError

from .set import KINDS, CalibrationSet, Kind

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sample:
    """One sequence.

    Attributes:
        tokens: int32 (T,), 2 <= T <= its source's sequence_length; 1 <= T if it was cut by a subsample.
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
    """Number of rows of one source that were skipped for the same reason.

    Attributes:
        first: the place of the first one.
        left_out: whether they are usable, but name a language that is not in the set's lists.
    """

    source: str
    reason: str
    count: int
    first: str
    left_out: bool = False


@dataclass(frozen=True)
class Drawn:
    """A subsample of a set, see subsample.py.

    Attributes:
        asked: the number of tokens asked for.
        samples, tokens: of the whole set.
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
        whole, long = row_of(self.samples), row_of(sample for sample in self.samples if sample.long)
        return {
            "name": self.name,
            "digest": self.digest,
            "sequence_length": self.sequence_length,
            "lengths": list(self.lengths),
            "samples": whole["samples"],
            "tokens": whole["tokens"],
            "long_samples": long["samples"],
            "long_tokens": long["tokens"],
            "truncated_samples": whole["truncated"],
            "truncated_tokens": whole["truncated_tokens"],
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


def token_tensors(data: CalibrationData, vocabulary: int) -> list[torch.Tensor]:
    """(T,) int64 for each sample.

    Raises:
        CalibrationError: a token id is outside the model's vocabulary.
    """
    import torch

    tensors = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    for sample, tokens in zip(data.samples, tensors, strict=True):
        if int(tokens.max()) >= vocabulary:
            raise CalibrationError(
                f"{data.name}: {sample.source}: token {int(tokens.max())} lies outside the model's vocabulary of "
                f"{vocabulary}; the tokenizer belongs to another model"
            )
    return tensors


Row = dict[str, int]  # samples, tokens, truncated (samples), truncated_tokens


def row_of(samples: Iterable[Sample]) -> Row:
    """The four counts of some samples; tokens are those that are left."""
    chosen = list(samples)
    return {
        "samples": len(chosen),
        "tokens": sum(len(sample.tokens) for sample in chosen),
        "truncated": sum(sample.truncated > 0 for sample in chosen),
        "truncated_tokens": sum(sample.truncated for sample in chosen),
    }


def grouped(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The samples of each category, sorted by its name."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.category, []).append(sample)
    return dict(sorted(groups.items()))


def by_category(data: CalibrationData) -> dict[str, Row]:
    """The counts of each category, sorted by name."""
    return {name: row_of(members) for name, members in grouped(data.samples).items()}


def by_language(calibration: CalibrationSet, data: CalibrationData) -> dict[Kind, dict[str, Row]]:
    """The counts of each language of the set's lists, in the lists' order; a sample that shows two counts in both."""
    return {
        kind: {
            name: row_of(sample for sample in data.samples if name in sample.languages)
            for name in calibration.languages.of(kind)
        }
        for kind in KINDS
    }


def language_counts(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, dict[str, int]]:
    """Number of samples that show each language of the set's lists, in the lists' order."""
    counts = Counter(name for sample in samples for name in sample.languages)
    return {kind: {name: counts[name] for name in calibration.languages.of(kind)} for kind in KINDS}


def missing_languages(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, list[str]]:
    """The languages of the set's lists that no sample shows."""
    counts = language_counts(calibration, samples)
    return {kind: [name for name, count in counts[kind].items() if not count] for kind in KINDS}
