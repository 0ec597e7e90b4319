"""Samples of a loaded calibration set: tokens and origin, dropped rows, counts, licences, a subsample."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from quantizers.system.errors import CalibrationError

from .set import KINDS, CalibrationSet, Kind, seeded

if TYPE_CHECKING:
    import torch

# Token ids, which the cache of loaded sets holds as a list of numbers.
Tokens = Annotated[
    NDArray[np.int32], PlainValidator(lambda ids: np.asarray(ids, np.int32)), PlainSerializer(lambda ids: ids.tolist())
]

_NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|research[- ]only", re.IGNORECASE)


@dataclass(frozen=True)
class Sample:
    """One sequence."""

    tokens: Tokens  # int32 (T,), 2 <= T <= its source's sequence_length; 1 <= T if it was cut by a subsample
    category: str  # such as `code/rust`, `spoken/hindi`, `math`
    source: str  # the dataset it comes from
    truncated: int = 0  # how many tokens were cut off; an estimate where the text is very long
    long: bool = False  # whether its source's sequence_length is larger than the set's
    languages: tuple[str, ...] = ()  # which of the set's languages its text is in, as its category says
    asked: tuple[str, ...] = ()  # the languages that a prompt asks for; the text need not be in them
    place: str = ""  # where its row is, such as `./texts.jsonl:12`; paths are relative to the set's folder
    text: str = ""  # its words without the chat template, not truncated
    left_out: tuple[str, ...] = ()  # parts that the chat template does not show: `system turn`, `thoughts`, `call`, …


@dataclass(frozen=True)
class Dropped:
    """Number of rows of one source that were skipped for the same reason."""

    source: str
    reason: str
    count: int
    first: str  # the place of the first one
    left_out: bool = False  # whether they are usable, but name a language that is not in the set's lists


@dataclass(frozen=True)
class Drawn:
    """Record of a subsample that was drawn from a set."""

    asked: int  # the number of tokens asked for
    samples: int  # of the whole set
    tokens: int  # of the whole set
    cut: int  # how many samples were cut because their category's share was used up


@dataclass(frozen=True)
class CalibrationData:
    """A set loaded with one tokenizer."""

    name: str
    sequence_length: int
    lengths: tuple[int, ...]  # all token limits at which samples were truncated, ascending
    samples: tuple[Sample, ...]  # by source in the set's order, and within one in the order in which they were sampled
    digest: str  # see `digest_of`
    dropped: tuple[Dropped, ...]  # all skipped rows, by source and reason
    versions: tuple[str, ...]  # for each source, the commit or file hash that was read; empty where it was left out
    licences: tuple[str, ...] = ()  # for each source, of its texts; empty where unknown
    rows: tuple[dict[str, str], ...] = ()  # for each source on the Hub, SHA-256 of each row that was tried, by place
    lock: bool = False  # whether the versions come from the set's lock
    notes: tuple[str, ...] = ()  # what a user should know, such as that the Hub was unreachable and the cache is used
    drawn: Drawn | None = None  # how the samples were drawn from the set; None if they are all of it

    def summary(self) -> dict[str, Any]:
        """Everything except the samples themselves, for report.json."""
        whole, long = row_of(self.samples), row_of(sample for sample in self.samples if sample.long)
        hidden = Counter((sample.source, kind) for sample in self.samples for kind in sample.left_out)
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
            "not_rendered": [
                {"source": source, "part": kind, "count": count} for (source, kind), count in sorted(hidden.items())
            ],
            "versions": list(self.versions),
            "licences": list(self.licences),
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
    """(T,) int64 for each sample. Raises CalibrationError if a token id is outside the model's vocabulary."""
    import torch

    tensors = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    for sample, tokens in zip(data.samples, tensors, strict=True):
        if int(tokens.max()) >= vocabulary:
            raise CalibrationError(
                f"{data.name}: {sample.source}",
                f"token {int(tokens.max())} is outside the model's vocabulary of {vocabulary}",
                "the tokenizer belongs to another model",
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


def category_names(samples: Iterable[Sample]) -> list[str]:
    """The categories in the order in which they appear, which is the same whatever they are called."""
    return list(dict.fromkeys(sample.category for sample in samples))


def identity(samples: Sequence[Sample]) -> str:
    """`digest_of` without the names of categories: which samples are in one, and all that a run's bytes depend on."""
    numbers = {name: str(number) for number, name in enumerate(category_names(samples))}
    return digest_of(replace(sample, category=numbers[sample.category]) for sample in samples)


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
    """The counts of the texts in each language of the set's lists, in the lists' order."""
    texts = data.samples
    return {
        kind: {
            name: row_of(text for text in texts if name in text.languages) for name in calibration.languages.of(kind)
        }
        for kind in KINDS
    }


def language_counts(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, dict[str, int]]:
    """Number of texts in each language of the set's lists, in the lists' order."""
    counts = Counter(name for sample in samples for name in sample.languages)
    return {kind: {name: counts[name] for name in calibration.languages.of(kind)} for kind in KINDS}


def asked_for(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, dict[str, int]]:
    """Number of samples whose prompt asks for a language, of those languages that are asked for."""
    counts = Counter(name for sample in samples for name in sample.asked)
    return {kind: {name: counts[name] for name in calibration.languages.of(kind) if counts[name]} for kind in KINDS}


def missing_languages(calibration: CalibrationSet, samples: Iterable[Sample]) -> dict[Kind, list[str]]:
    """The languages of the set's lists that no text is in, whatever prompts ask for."""
    counts = language_counts(calibration, samples)
    return {kind: [name for name, count in counts[kind].items() if not count] for kind in KINDS}


def shares(available: Mapping[str, int], tokens: int) -> dict[str, int]:
    """Tokens to draw from each category: the same number each, or all that it has.

    They add up to `tokens`, or to everything if that is less. The remainder of the division goes to the largest ones.
    """
    left, drawn = min(tokens, sum(available.values())), {}
    smallest_first = sorted(available, key=lambda name: (available[name], name))
    for number, name in enumerate(smallest_first):
        drawn[name] = min(available[name], left // (len(available) - number))
        left -= drawn[name]
    return drawn


def subsample(data: CalibrationData, tokens: int, seed: int) -> CalibrationData:
    """A subsample of `tokens` tokens in the set's order, drawn evenly over the categories; its digest is its own.

    Every category gives the same number of tokens; what a small one lacks is divided evenly among the others. Within a
    category whole samples are drawn, and the last one is cut to at least one token; `truncated` counts what it lost.
    Their order depends only on the set's seed, the category's name and its number of samples, so a larger subsample
    contains the smaller one. A set of no more than `tokens` tokens is used whole; if it has fewer, a note says so.
    """
    lengths, kept = [len(sample.tokens) for sample in data.samples], dict[int, int]()
    share = shares({name: row["tokens"] for name, row in by_category(data).items()}, tokens)
    for name in share:
        members = [index for index, sample in enumerate(data.samples) if sample.category == name]
        seeded(f"{seed}:draw:{name}").shuffle(members)
        for index in members:
            if share[name]:
                kept[index] = min(lengths[index], share[name])
                share[name] -= kept[index]
    samples = tuple(_truncated(data.samples[index], length) for index, length in sorted(kept.items()))
    cut, total = sum(length < lengths[index] for index, length in kept.items()), sum(lengths)
    few = f"{data.name} holds fewer than calibration.tokens, {total:,} of {tokens:,}: all are used"
    notes = (*data.notes, few) if total < tokens else data.notes
    drawn = Drawn(tokens, len(data.samples), total, cut)
    return replace(data, samples=samples, digest=digest_of(samples), notes=notes, drawn=drawn)


def within(data: CalibrationData, positions: int) -> CalibrationData:
    """The set with every text cut at the positions that a model has; a note counts the texts."""
    longer = sum(len(sample.tokens) > positions for sample in data.samples)
    if not longer:
        return data
    samples = tuple(_truncated(sample, min(len(sample.tokens), positions)) for sample in data.samples)
    note = f"texts longer than the {positions:,} positions of the model are cut there: {longer:,}"
    return replace(data, samples=samples, digest=digest_of(samples), notes=(*data.notes, note))


def _truncated(sample: Sample, length: int) -> Sample:
    lost = len(sample.tokens) - length
    return replace(sample, tokens=sample.tokens[:length], truncated=sample.truncated + lost) if lost else sample


def is_non_commercial(licence: str) -> bool:
    """Whether a licence forbids commercial use, by its name."""
    return _NON_COMMERCIAL.search(licence) is not None


def used_licences(calibration: CalibrationSet, data: CalibrationData) -> dict[str, str]:
    """The licence of each data set that samples were taken from, by its name."""
    used = {sample.source for sample in data.samples}
    pairs = zip(calibration.sources, data.licences, strict=True)
    return {source.dataset: licence for source, licence in pairs if source.dataset in used}


def in_words(licences: Mapping[str, str]) -> Iterable[str]:
    """Count the data sets by licence (see `used_licences`), and name those that forbid commercial use; a line each."""
    counts = Counter(sorted(licence or "unknown" for licence in licences.values())).most_common()
    yield f"licences: {', '.join(f'{licence} ({count})' for licence, count in counts)}"
    if restricted := [f"{name} ({licence})" for name, licence in licences.items() if is_non_commercial(licence)]:
        yield f"not for commercial use: {', '.join(restricted)}"
