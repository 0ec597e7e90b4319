"""Check what a calibration set contains, and whether that is what it claims."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from quantizers.calibration.data import CalibrationData, Sample, language_counts, missing_languages
from quantizers.calibration.languages import CODES
from quantizers.calibration.loading import Progress, load_samples
from quantizers.calibration.set import KINDS, CalibrationSet, Kind, read_set
from quantizers.calibration.tally import row_of

from .duplicates import Duplicate, find_duplicates
from .spoken import identify
from .truncation import cut_share, truncation_warnings

HELD_OUT = "held-out.yaml"  # next to a set: the texts that it must not contain


@dataclass(frozen=True)
class CategoryRow:
    """One row of the table: lengths in tokens; `truncated` samples lost `cut` tokens in total, a share `cut_share`."""

    category: str
    samples: int
    tokens: int
    median: int
    maximum: int
    truncated: int
    cut: int
    cut_share: float
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Twins:
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
        languages: number of samples by language, in the order of the set's lists.
        duplicates: pairs of samples within the set.
        held_out: path of the held-out set that it was compared with, or None.
        shared: pairs of a sample and a sample of the held-out set.
        identified: how many local samples of spoken languages were checked by language identification.
        findings: contradictions of the set's claims, one line each; empty if there are none.
        warnings: what contradicts nothing but is hardly meant, one line each.
    """

    path: str
    tokenizer: str
    summary: dict[str, Any]
    categories: tuple[CategoryRow, ...]
    languages: dict[Kind, dict[str, int]]
    missing: dict[Kind, list[str]]
    duplicates: tuple[Twins, ...]
    held_out: str | None
    shared: tuple[Twins, ...]
    identified: int
    mismatches: tuple[Mismatch, ...]
    findings: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no findings; with findings the command ends with exit code 3."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """One line: fine, what contradicts the set by kind and number, and how many warnings there are."""
        kinds = (
            (sum(map(len, self.missing.values())), "language without a text", "languages without a text"),
            (len(self.duplicates), "pair of equal texts", "pairs of equal texts"),
            (len(self.shared), "text that is also held out", "texts that are also held out"),
            (len(self.mismatches), "text in another language", "texts in another language"),
        )
        wrong = ", ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in kinds if count)
        warned = f"{len(self.warnings)} warning{'s' if len(self.warnings) > 1 else ''}" if self.warnings else ""
        if wrong:
            return f"contradicts what the set claims: {wrong}{f'; and {warned}' if warned else ''}"
        return f"nothing contradicts the set, but {warned}" if warned else "fine: nothing contradicts the set"

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return asdict(self) | {"ok": self.ok, "verdict": self.verdict}


def check_set(
    path: Path,
    tokenizer: str,
    held_out: Path | None = None,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> SetReport:
    """Load a set and check it.

    Args:
        path: the set.
        tokenizer: a model's folder or Hub id.
        held_out: a set with which it must share no text; None for `held-out.yaml` next to the set, if that exists.
        revision, trust_remote_code, workers, progress, cache: see `load_samples`.

    Raises:
        CalibrationError: as `load_samples`, except that a missing language is a finding, not an error.
    """
    load = partial(
        load_samples,
        tokenizer_source=tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        workers=workers,
        cache=cache,
        require_languages=False,
    )
    calibration = read_set(path)
    data = load(path, progress=progress)
    if held_out is None and path.name != HELD_OUT and (path.parent / HELD_OUT).is_file():
        held_out = path.parent / HELD_OUT
    other = load(held_out) if held_out else None
    duplicates, shared = _twins(data, other)
    identified, mismatches = _identification(calibration, data.samples)
    missing = missing_languages(calibration, data.samples)
    return SetReport(
        path=str(path),
        tokenizer=tokenizer,
        summary=data.summary(),
        categories=_table(data.samples),
        languages=language_counts(calibration, data.samples),
        missing=missing,
        duplicates=duplicates,
        held_out=str(held_out) if held_out else None,
        shared=shared,
        identified=identified,
        mismatches=mismatches,
        findings=_findings(missing, duplicates, shared, mismatches),
        warnings=truncation_warnings(data.samples),
    )


def _table(samples: tuple[Sample, ...]) -> tuple[CategoryRow, ...]:
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.category].append(sample)
    rows = []
    for category, members in sorted(groups.items()):
        lengths, row = [len(sample.tokens) for sample in members], row_of(members)
        rows.append(
            CategoryRow(
                category=category,
                samples=row["samples"],
                tokens=row["tokens"],
                median=int(median(lengths)),
                maximum=max(lengths),
                truncated=row["truncated"],
                cut=row["truncated_tokens"],
                cut_share=round(cut_share(members), 4),
                sources=tuple(dict.fromkeys(sample.source for sample in members)),
            )
        )
    return tuple(rows)


def _twins(data: CalibrationData, other: CalibrationData | None) -> tuple[tuple[Twins, ...], tuple[Twins, ...]]:
    """Pairs within the set, and pairs of one sample of the set and one of the other set."""
    count = len(data.samples)
    samples = data.samples + (other.samples if other else ())

    def twins(pair: Duplicate) -> Twins:
        return Twins(samples[pair.first].place, samples[pair.second].place, round(pair.similarity, 3))

    pairs = find_duplicates([sample.text for sample in samples])
    within = tuple(twins(pair) for pair in pairs if pair.second < count)
    across = tuple(twins(pair) for pair in pairs if pair.first < count <= pair.second)
    return within, across


def _identification(calibration: CalibrationSet, samples: tuple[Sample, ...]) -> tuple[int, tuple[Mismatch, ...]]:
    """Identify the language of every local text of a spoken language, and count the texts.

    Samples with an assigned language are left out: their prompt asks for that language, their text may be in another.
    """
    local = {source.dataset for source in calibration.sources if source.is_local}
    spoken = set(calibration.languages.spoken) & CODES.keys()
    claims = [
        (sample, name)
        for sample in samples
        if sample.source in local and not sample.dealt
        for name in sample.languages
        if name in spoken
    ]
    identified = [(sample.place, name, identify(sample.text)) for sample, name in claims]
    return len(claims), tuple(Mismatch(*answer) for answer in identified if answer[1] != answer[2])


def _findings(
    missing: dict[Kind, list[str]],
    duplicates: tuple[Twins, ...],
    shared: tuple[Twins, ...],
    mismatches: tuple[Mismatch, ...],
) -> tuple[str, ...]:
    findings = [f"no sample shows {', '.join(missing[kind])} ({kind})" for kind in KINDS if missing[kind]]
    findings += [f"{pair.second} repeats {pair.first} (similarity {pair.similarity})" for pair in duplicates]
    findings += [f"{pair.first} is also held out: {pair.second} ({pair.similarity})" for pair in shared]
    findings += [f"{m.place} claims {m.claimed}, but reads like {m.identified}" for m in mismatches]
    return tuple(findings)
