"""Show calibration sets on a terminal: a report, the difference of two sets, samples as the model reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from quantizers.calibration.loading import Progress, load_samples
from quantizers.calibration.set import KINDS
from quantizers.calibration.tokens import Renderer

from .check import SetReport
from .diff import SetDiff


def render(report: SetReport) -> RenderableType:
    """A report: a table by category, the languages, the dropped rows, and the findings in red."""
    total = report.summary
    parts: list[RenderableType] = [
        _categories(report),
        Text(
            f"{total['samples']:,} samples, {total['tokens']:,} tokens; {total['truncated_samples']:,} cut at "
            f"{' or '.join(f'{length:,}' for length in total['lengths'])}, which lost "
            f"{total['truncated_tokens']:,} tokens\n{_long_texts(total)}"
            f"digest {total['digest']}{''.join(f' ({note})' for note in total['notes'])}"
        ),
    ]
    for kind in KINDS:
        if report.languages[kind]:
            parts.append(_languages(kind, report.languages[kind]))
    for dropped in total["dropped"]:
        line = f"dropped {dropped['count']} of {dropped['source']}: {dropped['reason']} (first {dropped['first']})"
        parts.append(Text(line, style="yellow"))
    if report.identified:
        confirmed = report.identified - len(report.mismatches)
        parts.append(Text(f"language identification confirms {confirmed} of {report.identified} spoken texts"))
    parts.append(Text(f"compared with {report.held_out or 'no held-out set'}"))
    parts += [Text(finding, style="red") for finding in report.findings]
    parts.append(Text("nothing contradicts the set", style="green") if report.ok else Text(""))
    return Group(*parts)


def _long_texts(total: dict[str, Any]) -> str:
    if not total["long_samples"]:
        return ""
    return f"of these {total['long_samples']:,} long ones, {total['long_tokens']:,} tokens\n"


def _categories(report: SetReport) -> Table:
    table = Table(title=f"{report.summary['name']} ({report.path})", title_justify="left")
    table.add_column("category")
    for heading in ("samples", "tokens", "median", "maximum", "cut"):
        table.add_column(heading, justify="right")
    table.add_column("sources", overflow="fold")
    for row in report.categories:
        figures = (row.samples, row.tokens, row.median, row.maximum, row.truncated)
        table.add_row(row.category, *(f"{figure:,}" for figure in figures), ", ".join(row.sources))
    return table


def _languages(kind: str, counts: dict[str, int]) -> Text:
    present = sum(count > 0 for count in counts.values())
    line = Text(f"{kind} languages, {present} of {len(counts)}: ")
    for name, count in counts.items():
        line.append(f"{name} {count}  ", style="" if count else "bold red")
    return line


def render_diff(diff: SetDiff) -> RenderableType:
    """A difference as lines: `+` for what was added, `-` for what was removed."""
    if not diff:
        return Text("no difference")
    lines = [f"{key}: {before} -> {after}" for key, (before, after) in diff.settings.items()]
    for kind, (added, removed) in diff.languages.items():
        lines += [f"+ {kind} {name}" for name in added] + [f"- {kind} {name}" for name in removed]
    lines += [f"+ {name}: {samples} samples" for name, samples in diff.added.items()]
    lines += [f"- {name}: {samples} samples" for name, samples in diff.removed.items()]
    for name, changes in diff.changed.items():
        lines += [f"  {name}: {key}: {before} -> {after}" for key, (before, after) in changes.items()]
    lines += [f"  samples of {name}: {before or 0} -> {after or 0}" for name, (before, after) in diff.samples.items()]
    styles = {"+": "green", "-": "red"}
    return Group(*(Text(line, style=styles.get(line[0], "")) for line in lines))


@dataclass(frozen=True)
class Shown:
    """One sample as the model reads it, special tokens included; `position` counts from 0."""

    position: int
    category: str
    place: str
    tokens: int
    truncated: int
    text: str


def show_samples(
    path: Path,
    count: int,
    tokenizer: str,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    cache: Path | None = None,
) -> list[Shown]:
    """`count` samples of a set at evenly spaced positions.

    Raises:
        CalibrationError: as `load_samples`.
    """
    data = load_samples(
        path,
        tokenizer,
        revision=revision,
        trust_remote_code=trust_remote_code,
        cache=cache,
        require_languages=False,
    )
    decoder = Renderer(tokenizer, revision, trust_remote_code)
    total = len(data.samples)
    shown = []
    for position in sorted({number * total // count for number in range(count)}):
        sample = data.samples[position]
        text = decoder.text(sample.tokens)
        shown.append(Shown(position, sample.category, sample.place, len(sample.tokens), sample.truncated, text))
    return shown


def render_samples(shown: list[Shown]) -> RenderableType:
    """Samples with a headline each; rich does not interpret their text as markup."""
    parts: list[RenderableType] = []
    for sample in shown:
        cut = f", {sample.truncated} cut" if sample.truncated else ""
        title = f"{sample.position}: {sample.category}, {sample.place}, {sample.tokens} tokens{cut}"
        parts += [Rule(Text(title), align="left"), Text(sample.text)]
    return Group(*parts)


@contextmanager
def loading(console: Console) -> Iterator[Progress]:
    """A progress line while a set loads; pass the yielded function to `load_samples` as `progress`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading calibration data")

        def progress(count: int, dataset: str) -> None:
            bar.update(task, description=f"calibration: {count:,} samples, now {dataset}")

        yield progress
