"""Report on a calibration set: contents, languages, duplicates, contradictions of what it claims, and its samples."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quantizers.calibration.load_set import WORKERS, load_set
from quantizers.calibration.render import load_tokenizer
from quantizers.calibration.samples import (
    CalibrationData,
    Sample,
    asked_for,
    grouped,
    in_words,
    language_counts,
    missing_languages,
    row_of,
    used_licences,
)
from quantizers.calibration.set import CODES, KINDS, Kind, read_set
from quantizers.system.errors import InputError
from quantizers.system.extras import lacking
from quantizers.system.formatting import several
from quantizers.system.output_files import HELD_OUT

SHINGLE = 5  # words
NEAR = 0.5  # texts with at least this Jaccard similarity of their shingles are near-duplicates
# Share of a set's or a category's tokens that may be cut off without a warning. A text that is cut loses its end: the
# answer after the reasoning, the code after the imports. No measurement stands behind the number.
MOST_CUT = 0.25
NAMED = 5  # categories that a warning names at most
MOST = 20  # findings, texts or names that are shown; JSON has all of them
Pair = dict[str, Any]  # the places `first` and `second`, similarity
_NAMES = {code: name for name, code in CODES.items()}
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def check_set(
    path: Path,
    tokenizer: str,
    held_out: Path | None = None,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    workers: int = WORKERS,
    without: Sequence[str] = (),
    show: int = 0,
    source: str | None = None,
    category: str | None = None,
) -> dict[str, Any]:
    """Load a set and check it.

    Args:
        held_out: a set with which it must share no text; None for `held-out.yaml` beside it, if there is one.
        tokenizer, revision, trust_remote_code, workers, without: see `load_set`.
        show: how many samples to show, at evenly spaced positions, as the model reads them.
        source: of these only those of sources whose name contains this.
        category: only those of this category and the ones below it: `code` takes `code/rust` too.

    Returns:
        What is printed with --json. tokenizer: that of the model which counted the tokens, a folder or Hub id; summary
        and licences: see `CalibrationData.summary` and `used_licences`; categories: rows with lengths in tokens, whose
        `truncated` samples lost a share `cut_share`; languages: number of texts by language, in the order of the set's
        lists; asked_for: of samples whose prompt asks for it, which count as texts in none; missing: the languages
        without a text; duplicates: pairs of samples that are equal (similarity 1) or nearly equal, by their places;
        shared: of a sample and one of the set `held_out`; identified: how many texts of spoken languages were checked
        by language identification; mismatches: those in another language than their category claims; findings:
        contradictions of what the set claims, a line each, and `ok` without any; warnings: what contradicts nothing but
        is probably not intended; verdict: a line on both; samples: those to show.

    Raises:
        CalibrationError: as `load_set`, except that a missing language is a finding.
        InputError: the set has no sample that could be shown.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    reading = options | {"workers": workers, "require_languages": False}
    calibration, data = read_set(path), load_set(path, tokenizer, without=without, **reading)
    if held_out is None and path.name != HELD_OUT and (path.parent / HELD_OUT).is_file():
        held_out = path.parent / HELD_OUT
    others = load_set(held_out, tokenizer, **reading).samples if held_out else ()
    duplicates, shared = _duplicates(data.samples, others)
    missing, warnings = missing_languages(calibration, data.samples), truncation_warnings(data.samples)
    spoken = set(calibration.languages.spoken) & CODES.keys()
    claims = [(sample, name) for sample in data.samples for name in sample.languages if name in spoken]
    if claims and (lack := lacking("py3langid")):
        warnings += (f"the languages of {several(len(claims), 'spoken text')} are not checked: {'; '.join(lack)}",)
        claims = []
    identified = [
        {"place": sample.place, "claimed": name, "identified": identify(sample.text)} for sample, name in claims
    ]
    mismatches = [text for text in identified if text["claimed"] != text["identified"]]
    findings = [
        *(f"no text is in {', '.join(names)} ({kind})" for kind, names in missing.items() if names),
        *(f"{pair['second']} repeats {pair['first']} (similarity {pair['similarity']})" for pair in duplicates),
        *(f"{pair['first']} is also held out: {pair['second']} ({pair['similarity']})" for pair in shared),
        *(f"{text['place']} claims {text['claimed']}, but reads like {text['identified']}" for text in mismatches),
    ]
    contradicted = several(len(findings), "finding")
    warned = several(len(warnings), "warning")
    verdict = f"nothing contradicts the set, but {warned}" if warnings else "fine: nothing contradicts the set"
    if findings:
        verdict = f"contradicts what the set claims: {contradicted}{f' and {warned}' if warnings else ''}"
    report = {
        "path": str(path),
        "tokenizer": tokenizer,
        "summary": data.summary(),
        "categories": [_category_row(name, members) for name, members in grouped(data.samples).items()],
        "languages": language_counts(calibration, data.samples),
        "asked_for": asked_for(calibration, data.samples),
        "missing": missing,
        "licences": used_licences(calibration, data),
        "duplicates": duplicates,
        "held_out": str(held_out) if held_out else None,
        "shared": shared,
        "identified": len(identified),
        "mismatches": mismatches,
        "findings": findings,
        "ok": not findings,
        "warnings": warnings,
        "verdict": verdict,
    }
    if show:
        report["samples"] = _shown(data, show, source, category, load_tokenizer(tokenizer, **options))
    return report


def _category_row(category: str, members: Sequence[Sample]) -> dict[str, Any]:
    lengths = [len(sample.tokens) for sample in members]
    return row_of(members) | {
        "category": category,
        "median": int(median(lengths)),
        "maximum": max(lengths),
        "cut_share": round(cut_share(members), 4),
        "sources": tuple(dict.fromkeys(sample.source for sample in members)),
    }


def _duplicates(samples: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[list[Pair], list[Pair]]:
    """Pairs within the set, and pairs of one sample of the set and one of the held-out set."""
    both = [*samples, *held_out]
    within: list[Pair] = []
    shared: list[Pair] = []
    for first, second, similarity in find_duplicates([sample.text for sample in both]):
        if first < len(samples):
            pairs = within if second < len(samples) else shared
            places = {"first": both[first].place, "second": both[second].place}
            pairs.append(places | {"similarity": round(similarity, 3)})
    return within, shared


def identify(text: str) -> str:
    """The language of a text, by its everyday name, of those in `CODES`."""
    return _NAMES[_identifier().classify(text)[0]]


@cache
def _identifier() -> Any:
    import py3langid

    py3langid.set_languages(list(CODES.values()))
    return py3langid


def _shown(
    data: CalibrationData, count: int, source: str | None, category: str | None, tokenizer: Any
) -> list[dict[str, Any]]:
    chosen = [
        (position, sample)
        for position, sample in enumerate(data.samples)
        if (source is None or source in sample.source)
        and (category is None or f"{sample.category}/".startswith(f"{category.rstrip('/')}/"))
    ]
    if not chosen:
        asked = " and ".join(text for text in (source and f"source {source}", category) if text)
        raise InputError(data.name, f"no sample of {asked}", "the check's table lists its categories and sources")
    return [
        {
            "position": position,
            "category": sample.category,
            "place": sample.place,
            "tokens": len(sample.tokens),
            "truncated": sample.truncated,
            "text": tokenizer.decode(sample.tokens.tolist()),
        }
        for position, sample in (chosen[n] for n in sorted({n * len(chosen) // count for n in range(count)}))
    ]


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


def render(report: Mapping[str, Any], about_tokens: str = "") -> RenderableType:
    """A report: verdict, findings, warnings, the table by category, the rest, and samples with a headline each.

    `about_tokens` is said after the name of the tokenizer.
    """
    total = report["summary"]
    style = "red" if report["findings"] else "yellow" if report["warnings"] else "green"
    parts: list[RenderableType] = [Text(f"{total['name']}: {report['verdict']}", style=f"bold {style}")]
    parts += [Text(line, style="red") for line in first_lines(report["findings"])]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report["warnings"]]
    parts += [Text(""), _categories(report), Text(_totals(total)), *map(Text, in_words(report["licences"]))]
    parts.append(Text(f"tokens are counted with the tokenizer of {report['tokenizer']}{about_tokens}"))
    parts += [_languages(kind, report) for kind in KINDS if report["languages"][kind]]
    parts += [Text(line, style="yellow") for line in first_lines(map(_dropped, total["dropped"]))]
    for row in total["not_rendered"]:
        missing = f"{row['count']:,} × {row['part']} of {row['source']}"
        parts.append(Text(f"not shown by the chat template: {missing}", style="yellow"))
    if report["identified"]:
        confirmed = report["identified"] - len(report["mismatches"])
        parts.append(Text(f"language identification confirms {confirmed} of {report['identified']} spoken texts"))
    parts.append(Text(f"compared with {report['held_out'] or 'no held-out set'}"))
    for sample in report.get("samples", ()):
        cut = f", {sample['truncated']} cut" if sample["truncated"] else ""
        title = f"{sample['position']}: {sample['category']}, {sample['place']}, {sample['tokens']} tokens{cut}"
        parts += [Rule(Text(title), align="left"), Text(sample["text"])]
    return Group(*parts)


def first_lines(lines: Iterable[str]) -> list[str]:
    """The first MOST lines, and one that says how many more there are."""
    every = list(lines)
    return every if len(every) <= MOST else [*every[:MOST], f"and {len(every) - MOST:,} more; --json lists all of them"]


def _totals(total: Mapping[str, Any]) -> str:
    limits = " or ".join(f"{length:,}" for length in total["lengths"])
    cut = f"{total['truncated_samples']:,} cut at {limits}, which lost {total['truncated_tokens']:,} tokens"
    long = f"of these {total['long_samples']:,} long ones, {total['long_tokens']:,} tokens\n"
    return (
        f"{several(total['samples'], 'sample')}, {total['tokens']:,} tokens; "
        f"{cut if total['truncated_samples'] else 'none cut'}\n{long if total['long_samples'] else ''}"
        f"digest {total['digest']}{''.join(f' ({note})' for note in total['notes'])}"
    )


def _dropped(row: Mapping[str, Any]) -> str:
    if row["left_out"]:
        return f"left out: {row['reason']} ({several(row['count'], 'text')}, first at {row['first']})"
    return f"dropped {row['count']} of {row['source']}: {row['reason']} (first {row['first']})"


def _categories(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"{report['summary']['name']} ({report['path']})", title_justify="left")
    table.add_column("category")
    for heading in ("samples", "tokens", "median", "maximum", "cut", "tokens cut"):
        table.add_column(heading, justify="right")
    table.add_column("sources", overflow="fold")
    for row in report["categories"]:
        figures = (row[key] for key in ("samples", "tokens", "median", "maximum", "truncated"))
        share = f"{row['cut_share']:.0%}" if row["truncated"] else ""
        table.add_row(row["category"], *(f"{figure:,}" for figure in figures), share, ", ".join(row["sources"]))
    return table


def _languages(kind: Kind, report: Mapping[str, Any]) -> Text:
    counts, asked = report["languages"][kind], report["asked_for"][kind]
    also = f", {len(asked)} asked for by prompts" if asked else ""
    line = Text(f"{kind} languages, {sum(map(bool, counts.values()))} of {len(counts)} in it{also}: ")
    for name, count in counts.items():
        prompts = f" (asked for {asked[name]})" if name in asked else ""
        line.append(f"{name} {count}{prompts}  ", style="" if count else "bold red")
    return line
