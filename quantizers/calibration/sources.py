"""The rows of a source: a local file, or a dataset of the Hub, in an order that the seed decides.

Local JSON is read here rather than by `datasets`: a wrong line is named by its number, and rows
keep their own keys where Arrow would give every row the keys of all (and refuse mixed types).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..own_files import DATA, file_sha256
from ..shipped import shipped
from .set import DataSource, FromColumn, seeded


@dataclass
class SourceError(Exception):
    """A source that cannot be used. Equal reasons and remedies are shown together.

    Attributes:
        subject: the dataset, or the data file and line.
        reason: what is wrong with it.
        remedy: what to do.
    """

    subject: str
    reason: str
    remedy: str


class Unreachable(SourceError):
    """The Hub cannot be asked now; what was loaded before may stand in."""


@dataclass(frozen=True)
class Row:
    """One row and where it is found: `./texts.jsonl:12`, or the dataset and the row's number."""

    place: str
    values: dict[str, Any]


def published_name(digest: str, suffix: str) -> str:
    """What a local data file is called beside a published checkpoint: by its content, not by its author's name for it.

    Args:
        digest: SHA-256 of its bytes, hexadecimal.
        suffix: of its name, such as `.jsonl`.
    """
    return f"data-{digest[:16]}{suffix}"


def local_file(source: DataSource, folder: Path) -> Path:
    """Where a local file lies: beside its set; or, under the name that publishing gave it, among the shipped data.

    Raises:
        SourceError: it is in neither place.
    """
    path = folder / source.dataset
    if path.is_file():
        return path
    named = DATA.fullmatch(source.dataset)
    if named is None:
        raise SourceError(str(path), "cannot be read (No such file or directory)", "give an existing file")
    for file in sorted(shipped("calibration").rglob(f"*{path.suffix}")):
        if file_sha256(file).startswith(named[1]):
            return file
    reason = "the data of this set was not published with it"
    raise SourceError(str(path), reason, f"put the file there whose SHA-256 begins with {named[1]}")


def read_rows(source: DataSource, folder: Path, revision: str, seed: str) -> Iterator[Row]:
    """The rows of a source: in file order for `samples: all`, else shuffled by the seed.

    A streamed dataset is shuffled as `datasets` does it: its files, and within a buffer of eight
    rows for each sample asked for.

    Args:
        source: the source.
        folder: where the path of a local file starts.
        revision: the commit of a Hub dataset; a local file has none.
        seed: decides the order, together with the data and nothing else.

    Raises:
        SourceError: the source cannot be read, or has not the columns.
    """
    if source.is_local:
        path = local_file(source, folder)
        read = _parquet if path.suffix == ".parquet" else _json
        found = read(path, source.dataset)
        if not found:
            raise SourceError(str(path), "no rows", "add some")
        check_columns(source, {column for row in found for column in row.values})
        return (found[index] for index in order(len(found), source, seed))
    from .hub import hub_rows

    return hub_rows(source, revision, seed)


def needed_columns(source: DataSource) -> list[str]:
    """The columns that a source reads from every row."""
    columns = list(source.columns)
    if source.shape == "code-contests":
        columns += ["description", "solutions"]
    if isinstance(source.category, FromColumn):
        columns.append(source.category.column)
    return columns


def check_columns(source: DataSource, present: Iterable[str]) -> None:
    """Refuse a source whose data lacks a column that it reads."""
    for column in needed_columns(source):
        if column not in present:
            reason = f"no column {column!r} (it has {', '.join(sorted(present))})"
            raise SourceError(source.dataset, reason, "correct the source's columns or category")


def order(count: int, source: DataSource, seed: str) -> list[int]:
    """The order in which `count` rows are tried."""
    indices = list(range(count))
    if source.samples != "all":
        seeded(seed).shuffle(indices)
    return indices


def without_none(value: Any) -> Any:
    """Undo Arrow's filling: a struct column gives every row the keys of all rows, as None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as failure:
        problem = failure.strerror or str(failure)
        raise SourceError(str(path), f"cannot be read ({problem})", "give an existing file") from None


def _json(path: Path, name: str) -> list[Row]:
    """JSON lines, or (in a .json file) one list of objects. Places start with `name`."""
    raw = _bytes(path).removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and raw.lstrip()[:1] == b"[":
        items = enumerate(_parsed(raw, path, 1), 1)
        found = [Row(f"{name} item {number}", item) for number, item in items]
    else:
        lines = enumerate(raw.split(b"\n"), 1)
        found = [Row(f"{name}:{line}", _parsed(text, path, line)) for line, text in lines if text.strip()]
    for row in found:
        if not isinstance(row.values, dict):
            raise SourceError(row.place, "not a JSON object", "give one object for each sample")
    return found


def _parsed(raw: bytes, path: Path, line: int) -> Any:
    """JSON that begins in the given line of the file."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as failure:
        line += raw[: failure.start].count(b"\n")
        raise SourceError(f"{path}:{line}", "not UTF-8", "save the file as UTF-8") from None
    except json.JSONDecodeError as failure:
        place = f"{path}:{line + failure.lineno - 1}"
        reason = f"not valid JSON ({failure.msg}, column {failure.colno})"
        raise SourceError(place, reason, "correct the line") from None
    except RecursionError:
        raise SourceError(f"{path}:{line}", "nested too deeply", "flatten it") from None


def _parquet(path: Path, name: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    raw = _bytes(path)
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(raw))
    except (pyarrow.ArrowInvalid, OSError) as failure:
        reason = f"not a Parquet file ({str(failure).splitlines()[0]})"
        raise SourceError(str(path), reason, "give another file") from None
    return [Row(f"{name} row {number}", without_none(row)) for number, row in enumerate(table.to_pylist(), 1)]
