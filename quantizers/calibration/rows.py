"""Rows of a source in the order in which they are tried, which the data and the seed decide and nothing else.

A file has JSON lines, a list of JSON objects, Parquet, or CSV. The rows of a Hub dataset that were read are kept in the
user's cache, by dataset, commit and order; they depend neither on a tokenizer nor on other sources.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import sys
from codecs import iterdecode, utf_8_decode
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from quantizers.system.caches import user_cache
from quantizers.system.errors import first_line
from quantizers.system.files import file_sha256
from quantizers.system.output_files import DATA
from quantizers.system.package_data import shipped

from .hub import COMPRESSED, Hub, RemoteFile, Repository, data_files
from .set import DataSource, FromColumn, seeded
from .source_faults import SourceError

BLOCK_ROWS = 4  # rows that are shuffled together in a streamed dataset, and kept together, per sample asked for
BLOCK = 1 << 20  # bytes of a streamed file that are read at a time; of others eight times as many
BATCH = 64  # rows of a Parquet file that become Python values at a time
WINDOW = 1 << 20  # bytes of a Parquet column, or of a list in JSON, that are read at a time
FORMAT = 2  # of kept rows: increase it when the same dataset, commit and order give other rows
WRONG_PART = "correct the source's subset, split or revision"
DAMAGED = "tell its maker, or leave it out: --without ID, or remove it from the set"
_BETWEEN = re.compile(r"[\s,]*")  # the items of a list
Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """One row and its place: `./texts.jsonl:12`, or the dataset's id, its file, and the row's number or line."""

    place: str
    values: dict[str, Any]

    @property
    def sha256(self) -> str:
        """Of the values as JSON with sorted keys, hexadecimal."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


def local_rows(source: DataSource, folder: Path, seed: str) -> list[Row]:
    """The rows of a local file, whose path is relative to `folder`; at least one.

    Raises SourceError if it cannot be read, has no rows, or no row has a column that is needed.
    """
    path = local_file(source, folder)
    rows = read_local(path, source.dataset, needed_columns(source))
    _check_columns(source, rows, needed_columns(source), lambda: read_local(path, source.dataset))
    return shuffled(rows, source, seed)


def read_local(path: Path, place: str, columns: Collection[str] | None = None) -> list[Row]:
    """All rows of a local file; see `file_rows`. Raises SourceError also if it has none, or cannot be opened."""
    rows = list(file_rows(io.BytesIO(read_bytes(path)), str(path), place, columns))
    if not rows:
        raise SourceError(str(path), "no rows", "add some")
    return rows


def local_file(source: DataSource, folder: Path) -> Path:
    """The path of a local file: in its set's folder, or, if it has a published name, among the shipped data.

    Raises SourceError if there is no such file in either place.
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


def read_bytes(path: Path) -> bytes:
    """The bytes of a local file. Raises SourceError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        problem = failure.strerror or str(failure)
        raise SourceError(str(path), f"cannot be read ({problem})", "give an existing file") from None


def needed_columns(source: DataSource) -> list[str]:
    """The columns that the source's shape and category read."""
    more = ["description", "solutions"] if source.shape == "code-contests" else []
    category = [source.category.column] if isinstance(source.category, FromColumn) else []
    return list(dict.fromkeys([*source.columns, *more, *category]))


def _check_columns(
    source: DataSource, rows: list[Row], columns: Iterable[str], every: Callable[[], Iterable[Row]]
) -> None:
    """Refuse a source of which no row has one of the columns; `every` gives rows with all of theirs, to name them."""
    present = {column for row in rows for column in row.values}
    for column in columns:
        if column not in present:
            names = {name for row in islice(every(), len(rows)) for name in row.values}
            reason = f"no column {column!r} (it has {', '.join(sorted(names))})"
            raise SourceError(source.dataset, reason, "correct the source's columns or category")


def shuffled(items: list[Item], source: DataSource, seed: str) -> list[Item]:
    """Items in the order in which a source's rows are tried; in their own for `samples: all`."""
    order = list(items)
    if source.samples != "all":
        seeded(seed).shuffle(order)
    return order


def files_of(source: DataSource, repository: Repository) -> tuple[list[str], list[str]]:
    """The files of a source on the Hub, and those in another format; see `data_files`."""
    return data_files(repository.files, repository.card, source.subset, source.split, source.revision)


def rows_at(source: DataSource, commit: str, seed: str, hub: Hub, found: Repository | None = None) -> Iterator[Row]:
    """The rows of a Hub dataset at a commit: those that were kept, then fresh ones, which are kept as they are read.

    `found` is its repository at the commit, if the Hub was asked for it already. Raises SourceError if there is no such
    subset or split, a file cannot be read, or it lacks a column.
    """
    file, kept, writable = kept_file(source, seed, commit), 0, True
    for block in _kept_blocks(file):
        if not block:
            return  # the end of the dataset
        kept += 1
        yield from block
    fresh = _hub_rows(source, found or hub.look_up(source.dataset, commit), hub, seed)
    for number, block in enumerate(chain(islice(fresh, kept, None), [list[Row]()]), kept):
        line = {"block": number, "rows": [[row.place, row.values] for row in block]}
        if writable:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(f"\n{json.dumps(line)}\n")  # what was cut off before stays in a line of its own
            except OSError:  # the disk is full, or read-only; that the file is missing is said at the end
                writable = False
                with suppress(OSError):
                    file.unlink()
        yield from block


def kept_file(source: DataSource, seed: str, commit: str) -> Path:
    """Where the rows of a Hub dataset are kept at a commit; where there is no cache folder, one that cannot be made."""
    asked = source.model_dump(mode="json", include={"dataset", "subset", "split", "revision", "streaming", "samples"})
    key = json.dumps([FORMAT, asked, needed_columns(source), seed], sort_keys=True)
    folder = (user_cache() or Path(os.devnull)) / "moe-quantizers" / "rows"
    return folder / hashlib.sha256(key.encode()).hexdigest()[:32] / f"{commit}.jsonl"


def newest_kept(source: DataSource, seed: str) -> str:
    """The commit at which rows of a Hub dataset were kept last; empty if there are none."""
    files = kept_file(source, seed, "any").parent.glob("*.jsonl")
    return max(files, key=lambda file: file.stat().st_mtime, default=Path("")).stem


def _kept_blocks(file: Path) -> Iterator[list[Row]]:
    with suppress(OSError), file.open("rb") as stream:
        wanted = 0
        for text in stream:
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
                line = json.loads(text)
                if line["block"] == wanted:
                    wanted += 1
                    yield [Row(place, values) for place, values in line["rows"]]


def look_at_first_row(source: DataSource, repository: Repository, hub: Hub) -> None:
    """Read the first row of a Hub dataset's first file. Raises SourceError as `rows_at`; of the columns only the first
    must be in it.
    """
    one = source.model_copy(update={"streaming": True, "samples": 1})
    next(_hub_rows(one, repository, hub, "", checked=1))


def _hub_rows(
    source: DataSource, repository: Repository, hub: Hub, seed: str, checked: int | None = None
) -> Iterator[list[Row]]:
    """The rows of a Hub dataset in blocks, each of which is read when it is asked for.

    The first block must have the first `checked` of the needed columns; all of them for None.
    """
    try:
        files, _ = files_of(source, repository)
    except ValueError as failure:
        raise SourceError(source.dataset, str(failure), WRONG_PART) from None
    part = source.streaming and source.samples != "all"
    if part:
        seeded(f"{seed}:files").shuffle(files)
    columns = needed_columns(source)
    read = (row for file in files for row in _remote_rows(source, repository, hub, file, columns))
    rows = read if part else iter(shuffled(list(read), source, seed))
    size, number = None if source.samples == "all" else BLOCK_ROWS * source.samples, 0
    while block := list(islice(rows, size)):
        number += 1
        if number == 1:  # a column may be missing from a few rows
            _check_columns(source, block, columns[:checked], lambda: _remote_rows(source, repository, hub, files[0]))
        yield shuffled(block, source, f"{seed}:{number}") if part else block
    if not number:
        raise SourceError(source.dataset, "no rows", WRONG_PART)


def _remote_rows(
    source: DataSource, repository: Repository, hub: Hub, file: str, columns: Collection[str] | None = None
) -> Iterator[Row]:
    place, raw = f"{source.dataset}/{file}", RemoteFile(hub, repository, file)
    if file.endswith(".parquet"):  # which is read in pieces here and there
        return file_rows(raw, place, place, columns, DAMAGED)
    buffered = io.BufferedReader(raw, BLOCK if source.streaming else 8 * BLOCK)
    return file_rows(buffered, place, place, columns, DAMAGED)


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
    except RecursionError:
        raise _Damaged(f":{line}", "nested too deeply") from None


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
            yield f" row {number}", {name: value for name, value in values.items() if isinstance(name, str)}
    except (csv.Error, UnicodeDecodeError) as failure:
        raise _Damaged("", f"cannot be read as CSV ({failure})") from None
