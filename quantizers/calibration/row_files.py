"""Rows of one data file, local or on the Hub: JSON lines, a list of JSON objects, Parquet, or CSV.

Only the columns that are asked for become values: what the others hold, and of what types, does not matter.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from codecs import iterdecode, utf_8_decode
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from .source_faults import SourceError

BATCH = 64  # rows of a Parquet file that become Python values at a time
WINDOW = 1 << 20  # bytes of a Parquet column that are read at a time
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BOM = b"\xef\xbb\xbf"
_BETWEEN = re.compile(r"[\s,]*")  # the items of a list


@dataclass(frozen=True)
class Row:
    """One row and its place: `./texts.jsonl:12`, or the dataset's id, its file, and the row's number or line."""

    place: str
    values: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Of the values as JSON with sorted keys, hexadecimal."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


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
        remedy: for a line or file that cannot be read.

    Raises:
        SourceError: the file is not what its suffix says.
    """
    try:
        yield from _rows(stream, file, place, columns, remedy)
    except (OSError, EOFError) as failure:  # by the libraries that decompress
        reason = " ".join(str(failure).split()) or type(failure).__name__
        raise SourceError(file, f"cannot be read ({reason})", "give another file, or leave it out") from None


def _rows(stream: Any, file: str, place: str, columns: Collection[str] | None, remedy: str) -> Iterator[Row]:
    suffixes = Path(file).suffixes
    if suffixes[-1] in COMPRESSED:
        import pyarrow

        stream = io.BufferedReader(pyarrow.CompressedInputStream(stream, COMPRESSED[suffixes.pop()]))
    if suffixes[-1] == ".parquet":
        yield from _parquet_rows(stream, file, place, columns)
    elif suffixes[-1] in (".csv", ".tsv"):
        yield from _csv_rows(stream, file, place, columns, "\t" if suffixes[-1] == ".tsv" else ",", remedy)
    else:
        for number, values in _json_values(stream, file, suffixes[-1] == ".json", remedy):
            if not isinstance(values, dict):
                raise SourceError(f"{place}{number}", "not a JSON object", remedy)
            kept = values if columns is None else {name: values[name] for name in columns if name in values}
            yield Row(f"{place}{number}", kept)


def _json_values(stream: Any, file: str, may_be_list: bool, remedy: str) -> Iterator[tuple[str, Any]]:
    """Each object with its line or item as the end of its place."""
    first = stream.readline(WINDOW).removeprefix(BOM)
    if not (first.endswith(b"\n") or first.lstrip().startswith(b"[")):  # a list in one line is read bit by bit
        first += stream.readline()
    for line, text in enumerate(chain([first], stream), 1):
        if may_be_list and text.lstrip()[:1] == b"[":
            items = _list_items(text, stream, file, line, remedy)
            yield from ((f" item {number}", item) for number, item in enumerate(items, 1))
            return
        if text.strip():
            may_be_list = False
            yield f":{line}", _parse_json(text, file, line, remedy)


def _list_items(raw: bytes, stream: Any, file: str, line: int, remedy: str) -> Iterator[Any]:
    """The items of a list that begins in the given line, read only as far as they are asked for."""
    with _faults_named(file, line, remedy):
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


def _parse_json(raw: bytes, file: str, line: int, remedy: str) -> Any:
    """Parse JSON that begins in the given line of the file."""
    with _faults_named(file, line, remedy):
        return json.loads(raw.decode())


@contextmanager
def _faults_named(file: str, line: int, remedy: str) -> Iterator[None]:
    """Turn what is wrong with JSON that begins in the given line into a SourceError."""
    try:
        yield
    except UnicodeDecodeError as failure:
        line += failure.object[: failure.start].count(b"\n")
        raise SourceError(f"{file}:{line}", "not UTF-8", remedy) from None
    except json.JSONDecodeError as failure:
        place = f"{file}:{line + failure.lineno - 1}"
        raise SourceError(place, f"not valid JSON ({failure.msg}, column {failure.colno})", remedy) from None
    except RecursionError:
        raise SourceError(f"{file}:{line}", "nested too deeply", remedy) from None


def _parquet_rows(stream: Any, file: str, place: str, columns: Collection[str] | None) -> Iterator[Row]:
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
                yield Row(f"{place} row {number}", _values(values))
    except (pyarrow.ArrowException, ValueError, ArithmeticError, LookupError, OSError) as failure:
        problem = f"cannot be read after row {number}" if number else "not a Parquet file that can be read"
        remedy = "give another file, or convert it to .jsonl"
        raise SourceError(file, f"{problem} ({str(failure).splitlines()[0]})", remedy) from None


def _csv_rows(
    stream: Any, file: str, place: str, columns: Collection[str] | None, delimiter: str, remedy: str
) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # texts are longer than the module expects
    try:
        # Line by line: io.TextIOWrapper would pass the buffer by, with a request to the Hub for every 8 KiB.
        reader = csv.DictReader(iterdecode(stream, "utf-8-sig"), delimiter=delimiter, strict=True)
        for number, values in enumerate(reader, 1):
            present = {name: value for name, value in values.items() if isinstance(name, str)}
            wanted = present if columns is None else {name: present[name] for name in columns if name in present}
            yield Row(f"{place} row {number}", _values(wanted))
    except (csv.Error, UnicodeDecodeError) as failure:
        raise SourceError(file, f"cannot be read as CSV ({failure})", remedy) from None


def _values(row: dict[str, Any]) -> dict[str, Any]:
    """A row as JSON has it; a column that is empty in it is still one of its columns."""
    return {name: _plain(value) for name, value in row.items()}


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
