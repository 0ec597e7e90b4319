"""Report on a calibration set: contents, languages, duplicates, and contradictions of what it claims."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from quantizers.system.output_files import HELD_OUT

from .load_set import WORKERS, load_set
from .samples import Sample, asked_for, grouped, language_counts, missing_languages, row_of, used_licences
from .set import CODES, KINDS, CalibrationSet, Kind, read_set

SHINGLE = 5  # words
NEAR = 0.5  # texts with at least this Jaccard similarity of their shingles are near-duplicates
# Share of a set's or a category's tokens that may be cut off without a warning. A text that is cut loses its end: the
# answer after the reasoning, the code after the imports. No measurement stands behind the number.
MOST_CUT = 0.25
NAMED = 5  # categories that a warning names at most
_NAMES = {code: name for name, code in CODES.items()}
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


@dataclass(frozen=True)
class Duplicate:
    """The places of two samples that are equal (similarity 1) or nearly equal."""

    first: str
    second: str
    similarity: float


@dataclass(frozen=True)
class Mismatch:
    """A sample whose text is not in the language that its category claims."""

    place: str
    claimed: str
    identified: str


@dataclass(frozen=True)
class SetReport:
    """The result of checking a set.

    Attributes:
        tokenizer: the folder or Hub id of the model whose tokenizer counted the tokens.
        summary: see `CalibrationData.summary`.
        categories: rows of the table: lengths in tokens; `truncated` samples lost a share `cut_share`.
        languages: number of texts by language, in the order of the set's lists.
        asked_for: number of samples whose prompt asks for a language; they count as texts in none.
        missing: the languages without a text.
        licences: by data set, see `used_licences`.
        duplicates: pairs of samples within the set.
        held_out: path of the held-out set that it was compared with, or None.
        shared: pairs of a sample and a sample of the held-out set.
        identified: how many texts of spoken languages were checked by language identification.
        warnings: what contradicts nothing but is probably not intended, one line each.
    """

    path: str
    tokenizer: str
    summary: dict[str, Any]
    categories: tuple[dict[str, Any], ...]
    languages: dict[Kind, dict[str, int]]
    asked_for: dict[Kind, dict[str, int]]
    missing: dict[Kind, list[str]]
    licences: dict[str, str]
    duplicates: tuple[Duplicate, ...]
    held_out: str | None
    shared: tuple[Duplicate, ...]
    identified: int
    mismatches: tuple[Mismatch, ...]
    warnings: tuple[str, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """Contradictions of the set's claims, one line each; the command ends with exit code 3 if there are any."""
        return (
            *(f"no text is in {', '.join(self.missing[kind])} ({kind})" for kind in KINDS if self.missing[kind]),
            *(f"{pair.second} repeats {pair.first} (similarity {pair.similarity})" for pair in self.duplicates),
            *(f"{pair.first} is also held out: {pair.second} ({pair.similarity})" for pair in self.shared),
            *(f"{text.place} claims {text.claimed}, but reads like {text.identified}" for text in self.mismatches),
        )

    @property
    def verdict(self) -> str:
        """One line: fine, or how many findings and warnings there are."""
        found, warned = _several(len(self.findings), "finding"), _several(len(self.warnings), "warning")
        if self.findings:
            return f"contradicts what the set claims: {found}{f' and {warned}' if self.warnings else ''}"
        return f"nothing contradicts the set, but {warned}" if self.warnings else "fine: nothing contradicts the set"

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return asdict(self) | {"findings": self.findings, "ok": not self.findings, "verdict": self.verdict}


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def check_set(
    path: Path,
    tokenizer: str,
    held_out: Path | None = None,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    workers: int = WORKERS,
    without: Sequence[str] = (),
) -> SetReport:
    """Load a set and check it.

    Args:
        tokenizer: a model's folder or Hub id.
        held_out: a set with which it must share no text; None for `held-out.yaml` beside it, if there is one.
        revision, trust_remote_code, workers, without: see `load_set`.

    Raises:
        CalibrationError: as `load_set`, except that a missing language is a finding, not an error.
    """
    load = partial(
        load_set,
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
        revision=revision,
        workers=workers,
        require_languages=False,
    )
    calibration, data = read_set(path), load(path, without=without)
    if held_out is None and path.name != HELD_OUT and (path.parent / HELD_OUT).is_file():
        held_out = path.parent / HELD_OUT
    duplicates, shared = _duplicates(data.samples, load(held_out).samples if held_out else ())
    identified = _identified(calibration, data.samples)
    return SetReport(
        path=str(path),
        tokenizer=tokenizer,
        summary=data.summary(),
        categories=tuple(_category_row(name, members) for name, members in grouped(data.samples).items()),
        languages=language_counts(calibration, data.samples),
        asked_for=asked_for(calibration, data.samples),
        missing=missing_languages(calibration, data.samples),
        licences=used_licences(calibration, data),
        duplicates=duplicates,
        held_out=str(held_out) if held_out else None,
        shared=shared,
        identified=len(identified),
        mismatches=tuple(text for text in identified if text.claimed != text.identified),
        warnings=truncation_warnings(data.samples),
    )


def _category_row(category: str, members: Sequence[Sample]) -> dict[str, Any]:
    lengths = [len(sample.tokens) for sample in members]
    return row_of(members) | {
        "category": category,
        "median": int(median(lengths)),
        "maximum": max(lengths),
        "cut_share": round(cut_share(members), 4),
        "sources": tuple(dict.fromkeys(sample.source for sample in members)),
    }


def _duplicates(
    samples: Sequence[Sample], held_out: Sequence[Sample]
) -> tuple[tuple[Duplicate, ...], tuple[Duplicate, ...]]:
    """Pairs within the set, and pairs of one sample of the set and one of the held-out set."""
    both = [*samples, *held_out]
    pairs = [
        (second < len(samples), Duplicate(both[first].place, both[second].place, round(similarity, 3)))
        for first, second, similarity in find_duplicates([sample.text for sample in both])
        if first < len(samples)
    ]
    return tuple(pair for within, pair in pairs if within), tuple(pair for within, pair in pairs if not within)


def _identified(calibration: CalibrationSet, samples: Iterable[Sample]) -> list[Mismatch]:
    """The claimed and the identified language of every text of a spoken language."""
    spoken = set(calibration.languages.spoken) & CODES.keys()
    return [
        Mismatch(sample.place, name, identify(sample.text))
        for sample in samples
        for name in sample.languages
        if name in spoken
    ]


def identify(text: str) -> str:
    """The language of a text, by its everyday name, of those in `CODES`."""
    return _NAMES[_identifier().classify(text)[0]]


@cache
def _identifier() -> Any:
    import py3langid

    py3langid.set_languages(list(CODES.values()))
    return py3langid


def find_duplicates(texts: Sequence[str]) -> list[tuple[int, int, float]]:
    """All pairs of near-duplicates: their positions, ascending, and the Jaccard similarity of their five-word shingles.

    The similarity is 1 only if all words and their order are equal. Case, spaces and punctuation are ignored; Chinese
    and Japanese, which are written without spaces, count characters as words. An inverted index counts the shingles
    that two texts share, so no approximation such as MinHash is needed for sets of this size.
    """
    words = [_WORD.findall(unicodedata.normalize("NFKC", text).casefold()) for text in texts]
    shingles = [_shingles(text) for text in words]
    index: dict[int, list[int]] = defaultdict(list)
    for position, text_shingles in enumerate(shingles):
        for shingle in text_shingles:
            index[shingle].append(position)
    shared: Counter[tuple[int, int]] = Counter()
    for positions in index.values():
        shared.update(combinations(positions, 2))
    duplicates = []
    for (first, second), count in sorted(shared.items()):
        similarity = count / (len(shingles[first]) + len(shingles[second]) - count)
        if similarity >= NEAR:
            equal = words[first] == words[second]
            duplicates.append((first, second, 1.0 if equal else min(similarity, 0.999)))
    return duplicates


def _shingles(words: list[str]) -> set[int]:
    """CRC-32 checksums of all runs of five words, or of the whole text if it is shorter."""
    starts = range(max(1, len(words) - SHINGLE + 1)) if words else ()
    return {zlib.crc32(" ".join(words[start : start + SHINGLE]).encode()) for start in starts}


def cut_share(samples: Iterable[Sample]) -> float:
    """The share of the texts' tokens that was cut off, 0 to 1."""
    counts = row_of(samples)
    return counts["truncated_tokens"] / (counts["tokens"] + counts["truncated_tokens"])


def truncation_warnings(samples: Sequence[Sample]) -> tuple[str, ...]:
    """One line if more than `MOST_CUT` of the tokens are cut: of the whole set, or else of single categories."""
    if (share := cut_share(samples)) > MOST_CUT:
        return (f"{share:.0%} of the set's tokens are cut; raise sequence_length",)
    shares = {name: share for name, members in grouped(samples).items() if (share := cut_share(members)) > MOST_CUT}
    if not shares:
        return ()
    over = sorted(shares, key=lambda name: (-shares[name], name))
    names = ", ".join(f"{name} {shares[name]:.0%}" for name in over[:NAMED])
    more = f" and {len(over) - NAMED} more" if len(over) > NAMED else ""
    return (f"more than {MOST_CUT:.0%} of the tokens are cut in {names}{more}; raise their sequence_length",)
