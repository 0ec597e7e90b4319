"""Rows of a data file, which has JSON lines, a list of JSON objects, Parquet, or CSV; and the order in which the rows
of a source are tried, which the data and the seed decide and nothing else.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from codecs import iterdecode, utf_8_decode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from quantizers.system.errors import first_line

from .hub import COMPRESSED
from .row_formats import too_deep
from .set import DataSource, FromColumn, seeded
from .source_faults import SourceError

BATCH = 64  # rows of a Parquet file that become Python values at a time
WINDOW = 1 << 20  # bytes of a Parquet column, or of a list in JSON, that are read at a time
TOO_DEEP = "nested too deeply"
_BETWEEN = re.compile(r"[\s,]*")  # the items of a list
Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """One row and its place: `./texts.jsonl:12`, or the dataset's id, its file, and the row's number or line."""

    place: str
    values: dict[str, Any]

    @property
    def sha256(self) -> str:
        """SHA-256 of the values as JSON with sorted keys, hexadecimal."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


def needed_columns(source: DataSource) -> list[str]:
    """The columns that the source's shape and category read."""
    more = ["description", "solutions"] if source.shape == "code-contests" else []
    category = [source.category.column] if isinstance(source.category, FromColumn) else []
    return list(dict.fromkeys([*source.columns, *more, *category]))


def check_columns(
    source: DataSource, rows: list[Row], columns: Iterable[str], every: Callable[[], Iterable[Row]]
) -> None:
    """Refuse a source of which no row has one of the columns; `every` gives rows with all of theirs, to name them."""
    present = {column for row in rows for column in row.values}
    for column in columns:
        if column not in present:
            names = {name for row in islice(every(), len(rows)) for name in row.values}
            reason = f"no column {column!r} (it has {', '.join(sorted(names)) or 'none'})"
            raise SourceError(source.dataset, reason, "correct the source's columns or category")


def shuffled(items: list[Item], source: DataSource, seed: str) -> list[Item]:
    """Items in the order in which a source's rows are tried; in their own for `samples: all`."""
    order = list(items)
    if source.samples != "all":
        seeded(seed).shuffle(order)
    return order


@dataclass
class _Damaged(Exception):
    """A data file is not what its suffix says."""

    line: str  # `:12`; empty where it is not known
    reason: str


def file_rows(
    stream: Any, file: str, place: str, columns: Collection[str] | None = None, remedy: str = "correct the file"
) -> Iterator[Row]:
    """The rows of a data file in its order, read only as far as they are asked for.

    Args:
        stream: the binary file, seekable; a caller that reads a remote one gives it a buffer.
        file: its path, for messages; the suffixes say what it is, such as .jsonl, .json.gz, .parquet, .csv.
        place: what the rows' places begin with.
        columns: the columns to keep; None for all of them, of Parquet without dates and times, which no shape reads.
            A row may lack some.
        remedy: of the SourceError for a file that is not what its suffix says.
    """
    suffixes = Path(file).suffixes
    try:
        if suffixes[-1] in COMPRESSED:
            import pyarrow

            stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, COMPRESSED[suffixes.pop()]))
        suffix = suffixes[-1]
        if suffix == ".parquet":
            read = _parquet_rows(stream, file, columns)
        elif suffix in (".csv", ".tsv"):
            read = _csv_rows(stream, "\t" if suffix == ".tsv" else ",")
        else:
            read = _json_rows(stream, may_be_list=suffix == ".json")
        for where, values in read:
            if not isinstance(values, dict):
                raise SourceError(f"{place}{where}", "not a JSON object", remedy)
            kept = values if columns is None else {name: values[name] for name in columns if name in values}
            if too_deep(kept):  # so that whoever reads the row can write it as JSON again
                raise SourceError(f"{place}{where}", TOO_DEEP, remedy)
            yield Row(f"{place}{where}", kept)
    except _Damaged as fault:
        raise SourceError(f"{file}{fault.line}", fault.reason, remedy) from None
    except (OSError, EOFError) as failure:  # by the libraries that decompress
        reason = " ".join(str(failure).split()) or type(failure).__name__
        raise SourceError(file, f"cannot be read ({reason})", "give another file, or leave it out") from None


def _json_rows(stream: Any, may_be_list: bool) -> Iterator[tuple[str, Any]]:
    """Each value with its line or item as the end of its place."""
    first = stream.readline(WINDOW).removeprefix(b"\xef\xbb\xbf")
    if not (first.endswith(b"\n") or first.lstrip().startswith(b"[")):  # a list in one line is read bit by bit
        first += stream.readline()
    for line, text in enumerate(chain([first], stream), 1):
        if may_be_list and text.lstrip()[:1] == b"[":
            with _faults_named(line):
                for number, item in enumerate(_list_items(text, stream), 1):
                    yield f" item {number}", item
            return
        if text.strip():
            may_be_list = False
            with _faults_named(line):
                value = json.loads(text.decode())
            yield f":{line}", value


def _list_items(raw: bytes, stream: Any) -> Iterator[Any]:
    """The items of a list of which `raw` is the beginning, read only as far as they are asked for."""
    text, _ = utf_8_decode(raw)
    at = text.index("[") + 1
    while True:
        if between := _BETWEEN.match(text, at):
            at = between.end()
        if text.startswith("]", at):
            json.loads((raw + stream.read()).decode())  # which refuses other commas, and more than one list
            return
        try:
            item, at = json.JSONDecoder().raw_decode(text, at)
        except json.JSONDecodeError:
            more = stream.read(max(WINDOW, len(raw)))
            if not more:
                raise
            raw += more
            text, _ = utf_8_decode(raw)  # without a letter that is not whole yet
        else:
            yield item


@contextmanager
def _faults_named(line: int) -> Iterator[None]:
    """Turn what is wrong with JSON that begins in the given line into _Damaged."""
    try:
        yield
    except UnicodeDecodeError as failure:
        line += failure.object[: failure.start].count(b"\n")
        raise _Damaged(f":{line}", "not UTF-8") from None
    except json.JSONDecodeError as failure:
        reason = f"not valid JSON ({failure.msg}, column {failure.colno})"
        raise _Damaged(f":{line + failure.lineno - 1}", reason) from None
    except ValueError:  # Python's limit
        raise _Damaged(f":{line}", "a number with too many digits") from None
    except RecursionError:
        raise _Damaged(f":{line}", TOO_DEEP) from None


def _parquet_rows(stream: Any, file: str, columns: Collection[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        opened = pyarrow.parquet.ParquetFile(stream, buffer_size=WINDOW)
        readable = [field.name for field in opened.schema_arrow if not pyarrow.types.is_temporal(field.type)]
        wanted = [name for name in (readable if columns is None else columns) if name in readable]
        for batch in opened.iter_batches(BATCH, columns=wanted):
            for values in batch.to_pylist():
                number += 1
                yield f" row {number}", {name: _plain(value) for name, value in values.items()}
    except (pyarrow.ArrowException, ValueError, ArithmeticError, LookupError, OSError) as failure:
        problem = f"cannot be read after row {number}" if number else "not a Parquet file that can be read"
        remedy = "give another file, or convert it to .jsonl"
        raise SourceError(file, f"{problem} ({first_line(failure)})", remedy) from None


def _plain(value: Any) -> Any:
    """A value as JSON has it, without None in mappings: a column of structs gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):  # which old writers made of texts
        with suppress(UnicodeDecodeError):
            return value.decode()
        return None
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _csv_rows(stream: Any, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)  # texts are longer than the module expects
    try:
        # Line by line: io.TextIOWrapper would pass the buffer by, with a request to the Hub for every 8 KiB.
        reader = csv.DictReader(iterdecode(stream, "utf-8-sig"), delimiter=delimiter, strict=True)
        for number, values in enumerate(reader, 1):
            if any(values.pop(None, ())):  # such as a text with commas that is not quoted
                raise _Damaged(f" row {number}", "more fields than the first line has columns")
            yield f" row {number}", values
    except (csv.Error, UnicodeDecodeError) as failure:
        raise _Damaged("", f"cannot be read as CSV ({failure})") from None
