"""The rows of a source: a local file, or a dataset of the Hub, in an order that the seed decides.

Local JSON is read here rather than by `datasets`: a wrong line is named by its number, and rows
keep their own keys where Arrow would give every row the keys of all (and refuse mixed types).
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
