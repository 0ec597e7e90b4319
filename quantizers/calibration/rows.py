"""Rows of the sources of a set: local files, the columns that a source reads, and errors of all sources at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantizers.system.errors import CalibrationError
from quantizers.system.files import file_sha256
from quantizers.system.output_files import DATA
from quantizers.system.package_data import shipped

from .set import CalibrationSet, DataSource, FromColumn, seeded, source_lines


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


def file_rows(path: Path, name: str) -> list[Row]:
    """The rows of a local file, at least one, in its order; their places start with `name`.

    Raises:
        SourceError: it cannot be read, or has no rows.
    """
    rows = (_parquet if path.suffix == ".parquet" else _json)(path, name)
    if not rows:
        raise SourceError(str(path), "no rows", "add some")
    return rows


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as failure:
        problem = failure.strerror or str(failure)
        raise SourceError(str(path), f"cannot be read ({problem})", "give an existing file") from None


def _json(path: Path, name: str) -> list[Row]:
    """Read JSON lines, or, in a .json file, one list of objects. Places start with `name`."""
    raw = _bytes(path).removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and raw.lstrip()[:1] == b"[":
        items = enumerate(_parsed(raw, path, 1), 1)
        rows = [Row(f"{name} item {number}", item) for number, item in items]
    else:
        lines = enumerate(raw.split(b"\n"), 1)
        rows = [Row(f"{name}:{line}", _parsed(text, path, line)) for line, text in lines if text.strip()]
    for row in rows:
        if not isinstance(row.values, dict):
            raise SourceError(row.place, "not a JSON object", "give one object for each sample")
    return rows


def _parsed(raw: bytes, path: Path, line: int) -> Any:
    """Parse JSON that begins in the given line of the file."""
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


Result = TypeVar("Result")


def for_each_source(
    calibration: CalibrationSet, path: Path, work: Callable[[int, DataSource], Result], workers: int
) -> list[Result]:
    """Call `work(index, source)` for every source in threads; returns the results in the set's order.

    Raises:
        CalibrationError: one line for each reason, naming the set's file and line and every source that failed so; and
            one line for all sources on the Hub that cannot be reached. A note of the exception, which a traceback
            shows, has a line for each of them.
    """

    def attempt(index: int) -> tuple[list[Result], list[tuple[int, SourceError]]]:
        try:
            return [work(index, calibration.sources[index])], []
        except SourceError as failure:
            return [], [(index, failure)]

    with ThreadPoolExecutor(max_workers=workers) as pool:
        outcomes = list(pool.map(attempt, range(len(calibration.sources))))
    failures = [failure for _, failed in outcomes for failure in failed]
    if failures:
        lines = source_lines(path)
        unreachable = [(index, failure) for index, failure in failures if isinstance(failure, Unreachable)]
        wrong = [(index, failure) for index, failure in failures if not isinstance(failure, Unreachable)]
        messages = _by_reason(wrong, path, lines)
        if unreachable:
            asked = sum(not source.is_local for source in calibration.sources)
            messages.append(_out_of_reach(unreachable, asked, path, lines))
        error = CalibrationError("\n".join(messages))
        for index, failure in unreachable:
            error.add_note(f"{path}:{lines[index]}: {failure.subject}: {failure.reason}")
        raise error
    return [result for results, _ in outcomes for result in results]


def _out_of_reach(failures: list[tuple[int, Unreachable]], asked: int, path: Path, lines: list[int]) -> str:
    """One line for all sources out of reach: most often there is no network, which one of them says as well as 50."""
    index, first = failures[0]
    more, others = ("first: ", "; --debug lists them") if len(failures) > 1 else ("", "")
    return (
        f"{path}:{lines[index]}: {len(failures)} of {asked} sources on the Hub cannot be reached "
        f"({more}{first.subject}: {first.reason}); {first.remedy}{others}"
    )


def _by_reason(failures: list[tuple[int, SourceError]], path: Path, lines: list[int]) -> list[str]:
    groups: dict[tuple[str, str], list[tuple[int, SourceError]]] = {}
    for index, failure in failures:
        groups.setdefault((failure.reason, failure.remedy), []).append((index, failure))
    messages = []
    for (reason, remedy), members in groups.items():
        first = lines[members[0][0]]
        subjects = [members[0][1].subject]
        subjects += [f"{failure.subject} (line {lines[index]})" for index, failure in members[1:]]
        messages.append(f"{path}:{first}: {', '.join(subjects)}: {reason}; {remedy}")
    return messages
