"""A commented set for a file of texts: shape, columns and languages follow from its rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.system.errors import CalibrationError, InputError
from quantizers.system.shipped import shipped
from quantizers.system.strict_yaml import dump

from .languages import CODES
from .set import KINDS, LOCAL_SUFFIXES, DataSource, Kind, Languages, Shape, claimed_language, read_set, slug
from .shapes import Rejected, read_row
from .sources.read import file_rows
from .sources.rows import Row, SourceError

# Names that columns usually have on the Hub, likelier ones first.
MESSAGES = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query", "input", "problem")
ANSWERED = ("answer", "response", "output", "completion", "solution")
TEXT = ("text", "content", "story", "document", "body", "code")
CATEGORY = "category"

EXAMPLES = (
    {
        "question": "Write a Python function that returns the largest gap between neighbours of a sorted list.",
        "answer": "```python\ndef largest_gap(numbers):\n    pairs = zip(numbers, numbers[1:])\n"
        "    return max((right - left for left, right in pairs), default=0)\n```",
        "category": "code/python",
    },
    {
        "question": "A tank holds 240 litres and loses 5 % of what is in it every day. What is left after two days?",
        "answer": "After one day 240 · 0.95 = 228 litres are left, after two days 228 · 0.95 = 216.6 litres.",
        "category": "math",
    },
    {
        "question": "Our landlord wants to raise the rent by a fifth. How should I answer his letter?",
        "answer": "Thank him for the letter, ask which clause of the contract allows the increase and from when, and "
        "say that you will answer once you have compared it with the local limits. Agree to nothing yet.",
        "category": "advice",
    },
)


@dataclass(frozen=True)
class NewSet:
    """What `new_set` made: bytes by path, the set first, and what the user should know, one line each."""

    contents: dict[Path, bytes]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """How the rows of a file can be read, and the first of those that cannot be."""

    shape: Shape
    columns: tuple[str, ...]
    usable: int
    unusable: tuple[tuple[str, str], ...]  # place, reason


def new_set(path: Path, data: Path | None) -> NewSet:
    """A set for the texts of a file, or for three example rows that are written beside it.

    Raises:
        CalibrationError: the file cannot be read, or no shape fits its rows.
        InputError: one of the two has a suffix that its kind of file does not have.
    """
    if path.suffix in LOCAL_SUFFIXES:
        raise InputError(
            f"{path}: is the name of a data file; name the set such as mine.yaml, and give texts by --data"
        )
    contents: dict[Path, bytes] = {}
    if data is None:
        data = path.with_suffix(".jsonl")
        contents[data] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in EXAMPLES).encode()
        rows = [Row(f"{data}:{number}", dict(row)) for number, row in enumerate(EXAMPLES, 1)]
        notes = [f"replace the rows of {data} with your own"]
    else:
        if data.suffix not in LOCAL_SUFFIXES:
            raise InputError(f"{data}: not a file in {', '.join(LOCAL_SUFFIXES)}; convert it to one")
        try:
            rows = file_rows(data, str(data))
        except SourceError as failure:
            raise CalibrationError(f"{failure.subject}: {failure.reason}; {failure.remedy}") from None
        notes = []
    found = _find(rows, data)
    if found.unusable:
        place, reason = found.unusable[0]
        notes.append(f"{len(found.unusable)} of {len(rows)} rows cannot be used ({reason}, first at {place})")
    text = _text(path, data, found, rows)
    return NewSet({path: text.encode(), **contents}, tuple(notes))


def _find(rows: Sequence[Row], data: Path) -> _Found:
    """The shape and columns with which most rows can be read; of equal ones the first."""
    present = list(dict.fromkeys(column for row in rows for column in row.values))
    tried = [_try(rows, shape, columns) for shape, columns in _candidates(present, rows[0].values)]
    best = max(tried, key=lambda found: found.usable, default=None)
    if best is None or not best.usable:
        raise CalibrationError(
            f"{data}: no shape fits its columns ({', '.join(present)}); name them as in docs/calibration.md, Shapes"
        )
    return best


def _candidates(present: Sequence[str], first: dict[str, Any]) -> Iterator[tuple[Shape, tuple[str, ...]]]:
    if {"name", "description", "solutions"} <= set(present):
        yield "code-contests", ("name",)
    tools = ("tools",) if "tools" in present else ()
    for column in (name for name in MESSAGES if name in present):
        yield "chat", (column, *tools)
        yield "sharegpt", (column, *tools)
    for asked in (name for name in ASKED if name in present):
        for answered in (name for name in ANSWERED if name in present):
            yield "prompt-answer", (asked, answered)
    for column in (name for name in TEXT if name in present):
        yield "text", (column,)
    texts = [name for name in present if isinstance(first.get(name), str) and name != CATEGORY]
    if len(texts) == 1:
        yield "text", (texts[0],)


def _try(rows: Sequence[Row], shape: Shape, columns: tuple[str, ...]) -> _Found:
    source = DataSource(dataset="a.jsonl", columns=columns, shape=shape, samples=1, category="x")
    unusable = []
    for row in rows:
        try:
            read_row(row.values, source, "0")
        except Rejected as reason:
            unusable.append((row.place, str(reason)))
    return _Found(shape, columns, len(rows) - len(unusable), tuple(unusable))


def _text(path: Path, data: Path, found: _Found, rows: Sequence[Row]) -> str:
    categories = [row.values.get(CATEGORY) for row in rows]
    named = [category for category in categories if isinstance(category, str) and category.strip()]
    own = len(named) == len(rows)
    relative = os.path.relpath(data.absolute(), path.absolute().parent)
    languages = _languages(named) if own else Languages()
    listed = {kind: list(languages.of(kind)) for kind in KINDS if languages.of(kind)}
    example = "# languages: {programming: [Rust, C++], spoken: [Hindi], required: true}"
    return f"""\
# A calibration set. All keys are in docs/calibration.md of moe-quantizers; `quantize calibration schema` prints them.
{_line("name", path.stem)}
sequence_length: 2048            # tokens at which a text is cut
seed: 42                         # decides which rows a number of samples takes
{_line("languages", listed) if listed else example}
sources:
  - {_line("dataset", relative if relative.startswith("..") else f"./{relative}")}
    {_line("columns", list(found.columns))}
    shape: {found.shape}
    samples: {found.usable if found.unusable else "all"}                 # all, or how many
    {_line("category", {"column": CATEGORY} if own else slug(data.stem) or "text")}
  # - dataset: HuggingFaceH4/no_robots     # a data set on the Hub
  #   columns: [messages]
  #   shape: chat                  # text | prompt-answer | chat | sharegpt | code-contests
  #   samples: 12
  #   category: chat
"""


def _line(key: str, value: Any) -> str:
    """A key and its value in one line of YAML."""
    return dump({key: value}, width=10_000, short_in_one_line=not isinstance(value, str)).rstrip("\n")


def _languages(categories: Sequence[str]) -> Languages:
    """The languages that categories name, by the names of the shipped lists where those have them."""
    shipped_lists = read_set(shipped("calibration") / "embedded.yaml").languages
    known = {slug(name): name for kind in KINDS for name in shipped_lists.of(kind)} | {
        slug(name): name for name in CODES
    }
    found: dict[Kind, dict[str, str]] = {kind: {} for kind in KINDS}
    for category in categories:
        kind, slugs = claimed_language(category) or (None, set[str]())
        if kind:
            part = category.split("/")[1]
            name = next((known[each] for each in sorted(slugs) if each in known), part)
            found[kind].setdefault(slug(name), name)
    return Languages(programming=tuple(found["programming"].values()), spoken=tuple(found["spoken"].values()))
