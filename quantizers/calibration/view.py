"""Terminal output of the calibration commands: the report of a check, a difference, and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quantizers.system.errors import InputError

from .check import SetReport
from .diff import SetDiff, TextsDiff
from .load_set import load_set
from .render import Renderer
from .samples import CalibrationData, Row, Sample, in_words
from .set import KINDS, Kind

MOST = 20  # findings, texts or names that are shown; JSON has all of them


def render(report: SetReport, about_tokens: str = "") -> RenderableType:
    """A report: verdict, findings, warnings, the table by category, and the rest.

    Args:
        about_tokens: said after the name of the tokenizer.
    """
    total = report.summary
    style = "red" if report.findings else "yellow" if report.warnings else "green"
    parts: list[RenderableType] = [Text(f"{total['name']}: {report.verdict}", style=f"bold {style}")]
    parts += [Text(line, style="red") for line in _first(report.findings)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    parts += [Text(""), _categories(report), Text(_totals(total)), *map(Text, in_words(report.licences))]
    parts.append(Text(f"tokens are counted with the tokenizer of {report.tokenizer}{about_tokens}"))
    parts += [_languages(kind, report) for kind in KINDS if report.languages[kind]]
    parts += [Text(_dropped(row), style="yellow") for row in total["dropped"]]
    parts += [Text(_not_rendered(row), style="yellow") for row in total["not_rendered"]]
    if report.identified:
        confirmed = report.identified - len(report.mismatches)
        parts.append(Text(f"language identification confirms {confirmed} of {report.identified} spoken texts"))
    parts.append(Text(f"compared with {report.held_out or 'no held-out set'}"))
    return Group(*parts)


def _first(lines: Iterable[str]) -> list[str]:
    every = list(lines)
    return every if len(every) <= MOST else [*every[:MOST], f"and {len(every) - MOST:,} more; --json lists all of them"]


def _totals(total: Mapping[str, Any]) -> str:
    limits = " or ".join(f"{length:,}" for length in total["lengths"])
    cut = f"{total['truncated_samples']:,} cut at {limits}, which lost {total['truncated_tokens']:,} tokens"
    long = f"of these {total['long_samples']:,} long ones, {total['long_tokens']:,} tokens\n"
    return (
        f"{total['samples']:,} sample{'s' if total['samples'] != 1 else ''}, {total['tokens']:,} tokens; "
        f"{cut if total['truncated_samples'] else 'none cut'}\n{long if total['long_samples'] else ''}"
        f"digest {total['digest']}{''.join(f' ({note})' for note in total['notes'])}"
    )


def _dropped(row: Mapping[str, Any]) -> str:
    if row["left_out"]:
        texts = f"{row['count']:,} text{'s' if row['count'] > 1 else ''}"
        return f"left out: {row['reason']} ({texts}, first at {row['first']})"
    return f"dropped {row['count']} of {row['source']}: {row['reason']} (first {row['first']})"


def _not_rendered(row: Mapping[str, Any]) -> str:
    return f"not shown by the chat template: {row['count']:,} × {row['part']} of {row['source']}"


def _categories(report: SetReport) -> Table:
    table = Table(title=f"{report.summary['name']} ({report.path})", title_justify="left")
    table.add_column("category")
    for heading in ("samples", "tokens", "median", "maximum", "cut", "tokens cut"):
        table.add_column(heading, justify="right")
    table.add_column("sources", overflow="fold")
    for row in report.categories:
        figures = (row[key] for key in ("samples", "tokens", "median", "maximum", "truncated"))
        share = f"{row['cut_share']:.0%}" if row["truncated"] else ""
        table.add_row(row["category"], *(f"{figure:,}" for figure in figures), share, ", ".join(row["sources"]))
    return table


def _languages(kind: Kind, report: SetReport) -> Text:
    counts, asked = report.languages[kind], report.asked_for[kind]
    also = f", {len(asked)} asked for by prompts" if asked else ""
    line = Text(f"{kind} languages, {sum(map(bool, counts.values()))} of {len(counts)} in it{also}: ")
    for name, count in counts.items():
        prompts = f" (asked for {asked[name]})" if name in asked else ""
        line.append(f"{name} {count}{prompts}  ", style="" if count else "bold red")
    return line


def render_diff(diff: SetDiff, texts: TextsDiff | None = None) -> RenderableType:
    """A difference as lines, `+` for what was added, `-` for what was removed, and as a table by category.

    Args:
        texts: of the loaded sets; None if they were not loaded.
    """
    lines = [f"{sign} {name}" for sign, names in (("+", diff.added), ("-", diff.removed)) for name in names]
    for name, changes in diff.changed.items():
        lines += [f"  {name}: {key}: {before} -> {after}" for key, (before, after) in changes.items()]
    if not diff:
        lines = ["no difference" if texts is None else "no difference between the files"]
    return Group(*map(_signed, lines), *(_texts(texts) if texts is not None else ()))


def _texts(texts: TextsDiff) -> list[RenderableType]:
    """Texts and tokens before and after: of the set, of each category that changed, and the texts themselves."""
    samples, tokens = (_change(texts.total, count) for count in ("samples", "tokens"))
    total = (
        f"texts: {samples} ({len(texts.gained):,} gained, {len(texts.lost):,} lost); "
        f"tokens: {tokens}, counted with the tokenizer of {texts.tokenizer}"
    )
    parts: list[RenderableType] = [Text(total if texts else f"the same texts; {total}")]
    if texts.categories:
        table = Table("category")
        table.add_column("texts", justify="right")
        table.add_column("tokens", justify="right")
        for name, rows in texts.categories.items():
            table.add_row(name, _change(rows, "samples"), _change(rows, "tokens"))
        parts.append(table)
    for sign, members in (("+", texts.gained), ("-", texts.lost)):
        lines = (f"{text['place']} ({text['category']}, {text['tokens']:,} tokens)" for text in members)
        parts += [_signed(f"{sign} {line}") for line in _first(lines)]
    return parts


def _signed(line: str) -> Text:
    return Text(line, style={"+": "green", "-": "red"}.get(line[0], ""))


def _change(rows: tuple[Row, Row], count: str) -> str:
    before, after = (row[count] for row in rows)
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def show_samples(
    path: Path,
    count: int,
    tokenizer: str,
    *,
    source: str | None = None,
    category: str | None = None,
    revision: str = "main",
    trust_remote_code: bool = False,
    without: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """`count` samples of a set at evenly spaced positions, as the model reads them, special tokens included.

    Args:
        source: only those of sources whose name contains this.
        without: sources that are left out, see `load_set`.
        category: only those of this category and the ones below it: `code` takes `code/rust` too.

    Returns:
        For each sample its position in the whole set, from 0, category, place, tokens, truncated, and text.

    Raises:
        CalibrationError: as `load_set`.
        InputError: the set has no such sample.
    """
    options: dict[str, Any] = {"revision": revision, "without": without, "require_languages": False}
    data = load_set(path, tokenizer, trust_remote_code, **options)
    chosen = _chosen(data, source, category)
    decoder = Renderer(tokenizer, revision, trust_remote_code)
    return [
        {
            "position": position,
            "category": sample.category,
            "place": sample.place,
            "tokens": len(sample.tokens),
            "truncated": sample.truncated,
            "text": decoder.text(sample.tokens),
        }
        for position, sample in (chosen[n] for n in sorted({n * len(chosen) // count for n in range(count)}))
    ]


def _chosen(data: CalibrationData, source: str | None, category: str | None) -> list[tuple[int, Sample]]:
    """Positions and samples that pass both filters."""
    chosen = [
        (position, sample)
        for position, sample in enumerate(data.samples)
        if (source is None or source in sample.source)
        and (category is None or f"{sample.category}/".startswith(f"{category.rstrip('/')}/"))
    ]
    if not chosen:
        asked = " and ".join(text for text in (source and f"source {source}", category) if text)
        raise InputError(f"{data.name}: no sample of {asked}; the check's table lists its categories and sources")
    return chosen


def render_samples(samples: Iterable[Mapping[str, Any]]) -> RenderableType:
    """Samples with a headline each; rich does not interpret their text as markup."""
    parts: list[RenderableType] = []
    for sample in samples:
        cut = f", {sample['truncated']} cut" if sample["truncated"] else ""
        title = f"{sample['position']}: {sample['category']}, {sample['place']}, {sample['tokens']} tokens{cut}"
        parts += [Rule(Text(title), align="left"), Text(sample["text"])]
    return Group(*parts)
