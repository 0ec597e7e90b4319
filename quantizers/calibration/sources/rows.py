"""Rows of a source, local files, and what reading local files (read.py) and Hub datasets (hub.py) share.

Local JSON is not read with `datasets`: our own reader names the number of a wrong line, and rows keep
their own keys, while Arrow gives every row the keys of all rows and refuses mixed types.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizers.calibration.set import DataSource, FromColumn, seeded
from quantizers.system.own_files import DATA, file_sha256
from quantizers.system.shipped import shipped


@dataclass
class SourceError(Exception):
    """A source cannot be used. Sources with equal reason and remedy are shown in one line.

    Attributes:
        subject: the dataset, or the data file and line.
        reason: what is wrong with it.
        remedy: what to do.
    """

    subject: str
    reason: str
    remedy: str


class Unreachable(SourceError):
    """The Hub cannot be reached now; the cache may have the data. `reason` is what the connection failed with."""


@dataclass(frozen=True)
class Row:
    """One row and its place: `./texts.jsonl:12`, or the dataset and the row's number."""

    place: str
    values: dict[str, Any]


def published_name(digest: str, suffix: str) -> str:
    """The name of a local data file next to a published checkpoint: made from its content, not from its own name.

    Args:
        digest: SHA-256 of its bytes, hexadecimal.
        suffix: the suffix of its name, such as `.jsonl`.
    """
    return f"data-{digest[:16]}{suffix}"


def local_file(source: DataSource, folder: Path) -> Path:
    """The path of a local file: in its set's folder, or, if it has a published name, among the shipped data.

    Raises:
        SourceError: there is no such file in either place.
    """
    path = folder / source.dataset
    if path.is_file():
        return path
    published = DATA.fullmatch(source.dataset)
    if published is None:
        raise SourceError(str(path), "cannot be read (No such file or directory)", "give an existing file")
    for file in sorted(shipped("calibration").rglob(f"*{path.suffix}")):
        if file_sha256(file).startswith(published[1]):
            return file
    reason = "the data of this set was not published with it"
    raise SourceError(str(path), reason, f"put the file there whose SHA-256 begins with {published[1]}")


def needed_columns(source: DataSource) -> list[str]:
    """The columns that a source reads from every row."""
    columns = list(source.columns)
    if source.shape == "code-contests":
        columns += ["description", "solutions"]
    if isinstance(source.category, FromColumn):
        columns.append(source.category.column)
    return columns


def check_columns(source: DataSource, present: Iterable[str]) -> None:
    """Raise SourceError if the data lacks a column that the source reads."""
    for column in needed_columns(source):
        if column not in present:
            reason = f"no column {column!r} (it has {', '.join(sorted(present))})"
            raise SourceError(source.dataset, reason, "correct the source's columns or category")


def order(count: int, source: DataSource, seed: str) -> list[int]:
    """The order in which to try `count` rows, as their indices."""
    indices = list(range(count))
    if source.samples != "all":
        seeded(seed).shuffle(indices)
    return indices


def without_none(value: Any) -> Any:
    """Remove the None values that Arrow fills in: a struct column gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value
