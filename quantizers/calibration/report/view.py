"""Show what is said about calibration sets on a terminal: the report of a check, and the difference of two sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from quantizers.calibration.loading import Progress
from quantizers.calibration.set import KINDS

from .check import SetReport
from .diff import SetDiff
from .texts_diff import TextsDiff

LINES = 20  # findings, or texts, that are shown; JSON has all of them


def render(report: SetReport, about_tokens: str = "") -> RenderableType:
    """A report: the verdict, what is wrong and what is warned of, then the table by category and the rest.

    Args:
        about_tokens: said after the name of the tokenizer.
    """
    total = report.summary
    style = "red" if not report.ok else "yellow" if report.warnings else "green"
    parts: list[RenderableType] = [Text(f"{total['name']}: {report.verdict}", style=f"bold {style}")]
    parts += [Text(finding, style="red") for finding in report.findings[:LINES]]
    if len(report.findings) > LINES:
        parts.append(Text(f"and {len(report.findings) - LINES} more; --json lists all of them", style="red"))
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings]
    parts += [Text(""), _categories(report), Text(_totals(total))]
    parts.append(Text(f"tokens are counted with the tokenizer of {report.tokenizer}{about_tokens}"))
    for kind in KINDS:
        if report.languages[kind]:
            parts.append(_languages(kind, report.languages[kind]))
    parts += [Text(_dropped(row), style="yellow") for row in total["dropped"]]
    if report.identified:
        confirmed = report.identified - len(report.mismatches)
        parts.append(Text(f"language identification confirms {confirmed} of {report.identified} spoken texts"))
    parts.append(Text(f"compared with {report.held_out or 'no held-out set'}"))
    return Group(*parts)


def _totals(total: dict[str, Any]) -> str:
    cut = (
        f"{total['truncated_samples']:,} cut at {' or '.join(f'{length:,}' for length in total['lengths'])}, "
        f"which lost {total['truncated_tokens']:,} tokens"
    )
    long = f"of these {total['long_samples']:,} long ones, {total['long_tokens']:,} tokens\n"
    samples = f"{total['samples']:,} sample{'' if total['samples'] == 1 else 's'}"
    return (
        f"{samples}, {total['tokens']:,} tokens; {cut if total['truncated_samples'] else 'none cut'}"
        f"\n{long if total['long_samples'] else ''}"
        f"digest {total['digest']}{''.join(f' ({note})' for note in total['notes'])}"
    )


def _dropped(row: dict[str, Any]) -> str:
    if row["left_out"]:
        texts = f"{row['count']:,} text{'s' if row['count'] > 1 else ''}"
        return f"left out: {row['reason']} ({texts}, first at {row['first']})"
    return f"dropped {row['count']} of {row['source']}: {row['reason']} (first {row['first']})"


def _categories(report: SetReport) -> Table:
    table = Table(title=f"{report.summary['name']} ({report.path})", title_justify="left")
    table.add_column("category")
    for heading in ("samples", "tokens", "median", "maximum", "cut", "tokens cut"):
        table.add_column(heading, justify="right")
    table.add_column("sources", overflow="fold")
    for row in report.categories:
        figures = (row.samples, row.tokens, row.median, row.maximum, row.truncated)
        share = f"{row.cut_share:.0%}" if row.cut else ""
        table.add_row(row.category, *(f"{figure:,}" for figure in figures), share, ", ".join(row.sources))
    return table


def _languages(kind: str, counts: dict[str, int]) -> Text:
    present = sum(count > 0 for count in counts.values())
    line = Text(f"{kind} languages, {present} of {len(counts)}: ")
    for name, count in counts.items():
        line.append(f"{name} {count}  ", style="" if count else "bold red")
    return line


def render_diff(diff: SetDiff, texts: TextsDiff | None = None, note: str = "") -> RenderableType:
    """A difference as lines, `+` for what was added, `-` for what was removed, and as a table by category.

    Args:
        texts: what the loaded sets have; None if they were not loaded.
        note: why they were not.
    """
    lines = [f"{key}: {before} -> {after}" for key, (before, after) in diff.settings.items()]
    for kind, (added, removed) in diff.languages.items():
        lines += [f"+ {kind} {name}" for name in added] + [f"- {kind} {name}" for name in removed]
    lines += [f"+ {name}: {samples} samples" for name, samples in diff.added.items()]
    lines += [f"- {name}: {samples} samples" for name, samples in diff.removed.items()]
    for name, changes in diff.changed.items():
        lines += [f"  {name}: {key}: {before} -> {after}" for key, (before, after) in changes.items()]
    if texts is None:  # otherwise the table has the numbers that were really taken
        lines += [f"  samples of {name}: {old or 0} -> {new or 0}" for name, (old, new) in diff.samples.items()]
    if not diff:
        lines = ["no difference" if texts is None else "no difference between the files"]
    parts: list[RenderableType] = [_signed(line) for line in lines]
    if texts is not None:
        parts += _texts(texts)
    return Group(*parts, *([Text(note, style="yellow")] if note else []))


def _texts(texts: TextsDiff) -> list[RenderableType]:
    """Texts and tokens before and after: of the set, of each category that changed, and the texts themselves."""
    total = (
        f"texts: {_change(texts.texts)} ({len(texts.gained):,} gained, {len(texts.lost):,} lost); "
        f"tokens: {_change(texts.tokens)}, counted with the tokenizer of {texts.tokenizer}"
    )
    parts: list[RenderableType] = [Text(total if texts else f"the same texts; {total}")]
    if texts.categories:
        table = Table("category")
        table.add_column("texts", justify="right")
        table.add_column("tokens", justify="right")
        for name, changes in texts.categories.items():
            table.add_row(name, _change(changes["texts"]), _change(changes["tokens"]))
        parts.append(table)
    for sign, members in (("+", texts.gained), ("-", texts.lost)):
        parts += [_signed(f"{sign} {text.place} ({text.category}, {text.tokens:,} tokens)") for text in members[:LINES]]
        if len(members) > LINES:
            parts.append(_signed(f"{sign} and {len(members) - LINES:,} more; --json lists all of them"))
    return parts


def _signed(line: str) -> Text:
    return Text(line, style={"+": "green", "-": "red"}.get(line[0], ""))


def _change(change: tuple[int, int]) -> str:
    before, after = change
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


@contextmanager
def loading(console: Console) -> Iterator[Progress]:
    """A progress line while a set loads; pass the yielded function to `load_samples` as `progress`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading calibration data")

        def progress(count: int, dataset: str) -> None:
            bar.update(task, description=f"calibration: {count:,} samples, now {dataset}")

        yield progress
