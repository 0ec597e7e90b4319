"""Differences between two calibration sets, of their YAML files and of their loaded texts, and how they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantizers.calibration.samples import CalibrationData, Row, Sample, by_category, row_of
from quantizers.calibration.set import KINDS, CalibrationSet, read_set

from .check import first_lines

SETTINGS = "set"  # the entry of a file that has its keys at the top


def diff_sets(before: Path, after: Path) -> dict[str, Any]:
    """The changes from one set's file to another's. Raises CalibrationError if one of them is wrong.

    Sources are named by dataset, subset and split, languages by kind and name. `added` and `removed` have those that
    only one set has, with their keys (a language has none); `changed` the keys that differ, with both values, of each
    source in both, and of the `set` itself.
    """
    old, new = _entries(read_set(before)), _entries(read_set(after))
    changes = {}
    for name, keys in old.items():
        if name in new:
            changes[name] = {key: (value, new[name][key]) for key, value in keys.items() if value != new[name][key]}
    return {
        "added": {name: keys for name, keys in new.items() if name not in old},
        "removed": {name: keys for name, keys in old.items() if name not in new},
        "changed": {name: change for name, change in changes.items() if change},
    }


def _entries(calibration: CalibrationSet) -> dict[str, dict[str, Any]]:
    """The keys of the set, of its languages and of its sources; a second source of one name is called `… (2)`."""
    settings = calibration.model_dump(exclude={"sources", "languages"})
    entries = {SETTINGS: settings | {"languages.required": calibration.languages.required}}
    entries |= {f"{kind} {name}": {} for kind in KINDS for name in calibration.languages.of(kind)}
    counts: Counter[str] = Counter()
    for source in calibration.sources:
        name = " ".join(filter(None, (source.dataset, source.subset, source.split)))
        counts[name] += 1
        entries[name if counts[name] == 1 else f"{name} ({counts[name]})"] = source.model_dump()
    return entries


def diff_texts(old: CalibrationData, new: CalibrationData, tokenizer: str) -> dict[str, Any]:
    """The changes from one set to another, both loaded with this tokenizer, a folder or Hub id.

    `total` has both counts of the whole sets (see `row_of`), `categories` those of each category in which they differ;
    `gained` and `lost` have place, category and tokens of each text that only one set has, in its order. Texts are
    equal if their words are, regardless of category, source and template; duplicates count separately.
    """
    before = by_category(old)
    after = by_category(new)
    none = row_of(())
    rows = {name: (before.get(name, none), after.get(name, none)) for name in sorted({*before, *after})}
    return {
        "tokenizer": tokenizer,
        "total": (row_of(old.samples), row_of(new.samples)),
        "categories": {name: pair for name, pair in rows.items() if pair[0] != pair[1]},
        "gained": _missing_in(old.samples, new.samples),
        "lost": _missing_in(new.samples, old.samples),
    }


def _missing_in(others: Iterable[Sample], samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Entries of `samples` whose text `others` lack, or have less often."""
    available = Counter(sample.text for sample in others)
    missing = []
    for sample in samples:
        if available[sample.text]:
            available[sample.text] -= 1
        else:
            missing.append({"place": sample.place, "category": sample.category, "tokens": len(sample.tokens)})
    return missing


def render_diff(diff: Mapping[str, Any], texts: Mapping[str, Any] | None = None) -> RenderableType:
    """A difference as lines, `+` for what was added, `-` for what was removed, and as a table by category."""
    lines = [f"{sign} {name}" for sign, names in (("+", diff["added"]), ("-", diff["removed"])) for name in names]
    for name, changes in diff["changed"].items():
        lines += [f"  {name}: {key}: {before} -> {after}" for key, (before, after) in changes.items()]
    if not lines:
        lines = ["no difference" if texts is None else "no difference between the files"]
    return Group(*map(_signed, lines), *(_texts(texts) if texts is not None else ()))


def _texts(texts: Mapping[str, Any]) -> list[RenderableType]:
    """Texts and tokens before and after: of the set, of each category that changed, and the texts themselves."""
    gained, lost, categories = (texts[key] for key in ("gained", "lost", "categories"))
    total = (
        f"texts: {_change(texts['total'], 'samples')} ({len(gained):,} gained, {len(lost):,} lost); "
        f"tokens: {_change(texts['total'], 'tokens')}, counted with the tokenizer of {texts['tokenizer']}"
    )
    parts: list[RenderableType] = [Text(total if categories or gained or lost else f"the same texts; {total}")]
    if categories:
        table = Table("category")
        table.add_column("texts", justify="right")
        table.add_column("tokens", justify="right")
        for name, rows in categories.items():
            table.add_row(name, _change(rows, "samples"), _change(rows, "tokens"))
        parts.append(table)
    for sign, members in (("+", gained), ("-", lost)):
        lines = (f"{text['place']} ({text['category']}, {text['tokens']:,} tokens)" for text in members)
        parts += [_signed(f"{sign} {line}") for line in first_lines(lines)]
    return parts


def _signed(line: str) -> Text:
    return Text(line, style={"+": "green", "-": "red"}.get(line[0], ""))


def _change(rows: tuple[Row, Row], count: str) -> str:
    before, after = (row[count] for row in rows)
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"
