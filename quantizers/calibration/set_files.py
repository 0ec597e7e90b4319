"""Files of calibration sets: the shipped ones as a list and as copies, and a new one for a file of texts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantizers.system.errors import CalibrationError, InputError
from quantizers.system.files import write_new
from quantizers.system.output_files import HELD_OUT
from quantizers.system.package_data import shipped
from quantizers.system.strict_yaml import dump

from .lock import lock_path
from .row_formats import Rejected, read_row
from .rows import Row, SourceError, file_rows, local_rows
from .set import LOCAL_SUFFIXES, DataSource, Shape, read_set, slug


def rows() -> list[dict[str, str]]:
    """One row for every shipped set, sorted by name: name, samples, where its sources are, and what it holds."""
    return [_row(path) for path in sorted(shipped("calibration").glob("*.yaml"))]


def _row(path: Path) -> dict[str, str]:
    sources = read_set(path).sources
    local = sum(source.is_local for source in sources)
    places = [f"{local} local" if local else "", f"{len(sources) - local} on the Hub" if local < len(sources) else ""]
    counts = [len(local_rows(source, path.parent)) if source.samples == "all" else source.samples for source in sources]
    return {
        "name": path.stem,
        "samples": f"{sum(counts):,}",
        "sources": ", ".join(filter(None, places)),
        "about": path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip(" ."),
    }


def copy_set(name: str, folder: Path) -> list[Path]:
    """Copy a shipped set with its data and lock, and the held-out set that a check compares it with, with its data.

    The files keep their places relative to each other, and so the samples: the order of a local file's rows depends on
    its name in the set. Files that are there already with the same bytes stay.

    Returns:
        The copies, the set itself first.

    Raises:
        CalibrationError: no shipped set has this name.
        OutputError: a file is there that differs, or one cannot be written; then nothing was copied.
    """
    path = shipped("calibration") / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name != name or not path.is_file():
        raise CalibrationError(f"{name}: no such set; `quantize calibration list` lists them")
    sets = dict.fromkeys(each for each in (path, path.parent / HELD_OUT) if each.is_file())
    wanted = dict.fromkeys(file for each in sets for file in _files(each))
    contents = {folder / file.relative_to(path.parent): file.read_bytes() for file in wanted}
    write_new(contents)
    return list(contents)


def _files(path: Path) -> list[Path]:
    """A set's file, its lock if it has one, and its local data."""
    data = [source.dataset for source in read_set(path).sources if source.is_local]
    locks = [lock_path(path)] if lock_path(path).is_file() else []
    return [path, *locks, *(Path(os.path.normpath(path.parent / name)) for name in data)]


# Names that columns usually have on the Hub, likelier ones first.
MESSAGES = ("messages", "conversations", "conversation")
ASKED = ("prompt", "instruction", "question", "query", "input", "problem")
ANSWERED = ("answer", "response", "output", "completion", "solution")
TEXT = ("text", "content", "story", "document", "body", "code")
CATEGORY = "category"

EXAMPLE = Path(__file__).with_name("example.jsonl")


def new_set(path: Path, data: Path | None) -> tuple[dict[Path, bytes], list[str]]:
    """A set for the texts of a file, or for three example rows that are written beside it.

    Returns:
        Bytes by path, the set first; and what the user should know, one line each.

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
        contents[data], rows = EXAMPLE.read_bytes(), file_rows(EXAMPLE, str(data))
        notes = [f"replace the rows of {data} with your own"]
    else:
        if data.suffix not in LOCAL_SUFFIXES:
            raise InputError(f"{data}: not a file in {', '.join(LOCAL_SUFFIXES)}; convert it to one")
        try:
            rows, notes = file_rows(data, str(data)), []
        except SourceError as failure:
            raise CalibrationError(f"{failure.subject}: {failure.reason}; {failure.remedy}") from None
    source, unusable = _readable(rows, data)
    if unusable:
        notes.append(f"{len(unusable)} of {len(rows)} rows cannot be used as {source.shape}; the first: {unusable[0]}")
    return {path: _text(path, data, source, len(unusable), rows).encode(), **contents}, notes


def _readable(rows: Sequence[Row], data: Path) -> tuple[DataSource, list[str]]:
    """The shape and columns that read most rows, the first of equal ones; place and reason of each row left over."""
    present = list(dict.fromkeys(column for row in rows for column in row.values))
    tried = [(source, _unusable(rows, source)) for source in _candidates(present, rows[0].values)]
    best = min(tried, key=lambda one: len(one[1]), default=None)
    if best is None or len(best[1]) == len(rows):
        raise CalibrationError(
            f"{data}: no shape fits its columns ({', '.join(present)}); name them as in docs/calibration.md, Shapes"
        )
    return best


def _candidates(present: Sequence[str], first: dict[str, Any]) -> Iterator[DataSource]:
    def source(shape: Shape, *columns: str) -> DataSource:
        return DataSource(dataset="a.jsonl", columns=columns, shape=shape, samples=1, category="x")

    if {"name", "description", "solutions"} <= set(present):
        yield source("code-contests", "name")
    tools = ("tools",) if "tools" in present else ()
    for column in (name for name in MESSAGES if name in present):
        yield source("chat", column, *tools)
        yield source("sharegpt", column, *tools)
    for asked in (name for name in ASKED if name in present):
        for answered in (name for name in ANSWERED if name in present):
            yield source("prompt-answer", asked, answered)
    texts = [name for name in present if isinstance(first.get(name), str) and name != CATEGORY]
    for column in [*(name for name in TEXT if name in present), *(texts if len(texts) == 1 else [])]:
        yield source("text", column)


def _unusable(rows: Sequence[Row], source: DataSource) -> list[str]:
    unusable = []
    for row in rows:
        try:
            read_row(row.values, source, "0")
        except Rejected as reason:
            unusable.append(f"{row.place}: {reason}")
    return unusable


def _text(path: Path, data: Path, source: DataSource, unusable: int, rows: Sequence[Row]) -> str:
    categories = [row.values.get(CATEGORY) for row in rows]
    named = all(isinstance(category, str) and category.strip() for category in categories)
    relative = os.path.relpath(data.absolute(), path.absolute().parent)
    return f"""\
# A calibration set. All keys are in docs/calibration.md of moe-quantizers; `quantize calibration schema` prints them.
{_line("name", path.stem)}
sequence_length: 2048            # tokens at which a text is cut
seed: 42                         # decides which rows a number of samples takes
# languages: {{programming: [Rust, C++], spoken: [Hindi], required: true}}
sources:
  - {_line("dataset", relative if relative.startswith("..") else f"./{relative}")}
    {_line("columns", list(source.columns))}
    shape: {source.shape}
    samples: {len(rows) - unusable if unusable else "all"}                 # all, or how many
    {_line("category", {"column": CATEGORY} if named else slug(data.stem) or "text")}
  # - dataset: HuggingFaceH4/no_robots     # a data set on the Hub
  #   columns: [messages]
  #   shape: chat                  # text | prompt-answer | chat | sharegpt | code-contests
  #   samples: 12
  #   category: chat
"""


def _line(key: str, value: Any) -> str:
    """A key and its value in one line of YAML."""
    return dump({key: value}, width=10_000, short_in_one_line=not isinstance(value, str)).rstrip("\n")
