"""Rows of a set's sources, local files and datasets of the Hub, and the errors of all sources at once."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantizers.system.errors import CalibrationError
from quantizers.system.files import file_sha256
from quantizers.system.output_files import DATA
from quantizers.system.package_data import shipped

from .set import CalibrationSet, DataSource, FromColumn, seeded, source_lines

BUFFERED_ROWS = 8  # rows in the shuffle buffer of a streamed dataset, per sample asked for
NAMED = 5  # unreachable sources that a message names at most
TIMEOUT = 10.0  # seconds to wait for the Hub's answer about one dataset

Result = TypeVar("Result")


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
    """The Hub cannot be reached now; the cache may have the data."""


@dataclass(frozen=True)
class Row:
    """One row and its place: `./texts.jsonl:12`, or the dataset and the row's number."""

    place: str
    values: dict[str, Any]


def read_rows(source: DataSource, folder: Path, revision: str, seed: str) -> Iterator[Row]:
    """The rows of a source: in file order for `samples: all`, else shuffled with the seed.

    A streamed dataset is shuffled as `datasets` does it: the order of its files, and the rows within a buffer of eight
    rows for each sample asked for.

    Args:
        folder: the folder to which the path of a local file is relative.
        revision: the commit of a Hub dataset; a local file has none.
        seed: with the data, the only thing that decides the order.

    Raises:
        SourceError: the source cannot be read, or lacks a column.
    """
    if not source.is_local:
        return _hub_rows(source, revision, seed)
    rows = local_rows(source, folder)
    return (rows[index] for index in _order(len(rows), source, seed))


def _needed_columns(source: DataSource) -> list[str]:
    columns = list(source.columns)
    if source.shape == "code-contests":
        columns += ["description", "solutions"]
    if isinstance(source.category, FromColumn):
        columns.append(source.category.column)
    return list(dict.fromkeys(columns))


def _check_columns(name: str, needed: Iterable[str], present: Iterable[str]) -> None:
    for column in needed:
        if column not in present:
            reason = f"no column {column!r} (it has {', '.join(sorted(present))})"
            raise SourceError(name, reason, "correct the source's columns or category")


def _order(count: int, source: DataSource, seed: str) -> list[int]:
    """The order in which to try `count` rows, as their indices."""
    indices = list(range(count))
    if source.samples != "all":
        seeded(seed).shuffle(indices)
    return indices


def _without_none(value: Any) -> Any:
    """Remove the None values that Arrow fills in: a struct column gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


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


def read_bytes(path: Path) -> bytes:
    """The bytes of a local file. Raises SourceError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        problem = failure.strerror or str(failure)
        raise SourceError(str(path), f"cannot be read ({problem})", "give an existing file") from None


def local_rows(source: DataSource, folder: Path) -> list[Row]:
    """The rows of a local source in the file's order, see `file_rows`."""
    return file_rows(local_file(source, folder), source.dataset, _needed_columns(source))


def file_rows(path: Path, name: str, columns: Sequence[str] | None = None) -> list[Row]:
    """The rows of a local file, at least one, in its order; their places start with `name`.

    Args:
        columns: those that are needed, the only ones that are read of a Parquet file; None for all.

    Raises:
        SourceError: it cannot be read, has no rows, or lacks a column.
    """
    rows = (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, name, columns)
    if not rows:
        raise SourceError(str(path), "no rows", "add some")
    return rows


def _json_rows(path: Path, name: str, columns: Sequence[str] | None) -> list[Row]:
    """Rows of JSON lines, or, in a .json file, of one list of objects."""
    raw = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    if path.suffix == ".json" and raw.lstrip()[:1] == b"[":
        rows = [Row(f"{name} item {number}", item) for number, item in enumerate(_parse_json(raw, path, 1), 1)]
    else:
        lines = enumerate(raw.split(b"\n"), 1)
        rows = [Row(f"{name}:{line}", _parse_json(text, path, line)) for line, text in lines if text.strip()]
    for row in rows:
        if not isinstance(row.values, dict):
            raise SourceError(row.place, "not a JSON object", "give one object for each sample")
    if rows:
        _check_columns(name, columns or (), {column for row in rows for column in row.values})
    return rows


def _parse_json(raw: bytes, path: Path, line: int) -> Any:
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


def _parquet_rows(path: Path, name: str, columns: Sequence[str] | None) -> list[Row]:
    """Rows of a Parquet file; None for all columns but dates and times, which no shape reads."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(read_bytes(path)))
        schema = file.schema_arrow
    except (pyarrow.ArrowInvalid, OSError) as failure:
        reason = f"not a Parquet file ({str(failure).splitlines()[0]})"
        raise SourceError(str(path), reason, "give another file") from None
    if columns is None:
        columns = [field.name for field in schema if not pyarrow.types.is_temporal(field.type)]
    _check_columns(name, columns, schema.names)
    rows = [Row(f"{name} row {number}", {}) for number in range(1, file.metadata.num_rows + 1)]
    for column in columns:
        try:
            values = file.read([column]).column(column).to_pylist()
        except (pyarrow.ArrowException, ValueError, ArithmeticError, LookupError, OSError) as failure:
            reason = f"column {column!r} cannot be read ({_short(failure)})"
            raise SourceError(str(path), reason, "correct it, or convert the file to .jsonl") from None
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row.values[column] = _without_none(value)
    return rows


def _hub_rows(source: DataSource, revision: str, seed: str) -> Iterator[Row]:
    """The rows of a Hub dataset, streamed if the source says so."""
    import datasets

    columns = _needed_columns(source)
    with explained(source):
        data: Any = datasets.load_dataset(
            source.dataset, source.subset, split=source.split, revision=revision, streaming=source.streaming
        )
        if not source.streaming:
            _check_columns(source.dataset, columns, data.column_names)
            data = data.select_columns(columns)
            for index in _order(len(data), source, seed):
                yield Row(f"{source.dataset} row {index + 1}", _without_none(data[index]))
            return
        if source.samples != "all":
            number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
            data = data.shuffle(seed=number, buffer_size=BUFFERED_ROWS * source.samples)
        for number, values in enumerate(data, 1):
            _check_columns(source.dataset, columns, values)
            yield Row(f"{source.dataset} streamed row {number}", _without_none({c: values[c] for c in columns}))


def resolve(source: DataSource) -> str:
    """The commit to which a Hub source's revision points now.

    Raises:
        Unreachable: the Hub cannot be reached.
        SourceError: the Hub has no such dataset or revision.
    """
    import huggingface_hub

    with explained(source):
        hub = huggingface_hub.HfApi()
        return str(hub.dataset_info(source.dataset, revision=source.revision, timeout=TIMEOUT).sha)


@contextmanager
def explained(source: DataSource) -> Iterator[None]:
    """Turn exceptions of `datasets` and `huggingface_hub` into a SourceError with a reason and a remedy."""
    try:
        yield
    except SourceError:
        raise
    except Exception as failure:
        raise _explanation(failure, source) from failure


def _explanation(failure: Exception, source: DataSource) -> SourceError:
    import httpx
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import errors

    name = source.dataset
    if isinstance(failure, errors.GatedRepoError) or "gated dataset" in str(failure):
        return SourceError(name, "gated", "accept its terms on the Hub, then `hf auth login`")
    missing_revision = re.match(r"Revision '([^']+)' doesn't exist", str(failure))
    if missing_revision or isinstance(failure, errors.RevisionNotFoundError):
        remedy = "correct the source's revision, or lock the set again"
        return SourceError(name, f"no revision {missing_revision[1] if missing_revision else source.revision}", remedy)
    if isinstance(failure, (errors.RepositoryNotFoundError, DatasetNotFoundError)):
        remedy = "correct the id, or `hf auth login` if it is private"
        return SourceError(name, "no such dataset on the Hub", remedy)
    overloaded = isinstance(failure, errors.HfHubHTTPError) and failure.response.status_code in (429, *range(500, 600))
    if overloaded or isinstance(failure, (ConnectionError, TimeoutError, httpx.TransportError)):
        remedy = "check the network, or take the shipped set embedded, which needs none (--calibration embedded)"
        offline = isinstance(failure, errors.OfflineModeIsEnabled)
        reason = "HF_HUB_OFFLINE is set" if offline else _short(failure)
        return Unreachable(name, f"cannot be reached ({reason})", remedy)
    reason = f"cannot be loaded ({_short(failure)})"
    if isinstance(failure, OSError) and failure.errno in (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        return SourceError(name, reason, "set HF_HOME to a folder that can be written and has room")
    return SourceError(name, reason, "correct the source's subset, split or revision")


def _short(failure: Exception) -> str:
    """The failure as part of a line: without memory addresses and request ids, at most 160 characters."""
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    text = re.sub(r"\s*\(Request ID: [^)]*\)| at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 160 else text[:157] + "..."


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars, log lines and warnings of `datasets` and `huggingface_hub`; our own messages remain."""
    import datasets
    import huggingface_hub.utils

    level = logging.root.manager.disable
    with warnings.catch_warnings(), ExitStack() as restored:
        warnings.simplefilter("ignore")
        logging.disable()
        restored.callback(logging.disable, level)
        for library in (datasets, huggingface_hub.utils):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                restored.callback(library.enable_progress_bars)
        yield


def for_each_source(
    calibration: CalibrationSet, path: Path, work: Callable[[int, DataSource], Result], workers: int
) -> list[Result]:
    """Call `work(index, source)` for every source in threads; returns the results in the set's order.

    Raises:
        CalibrationError: one line for each reason, naming the set's file and line and the sources that failed so; and
            one line for all sources on the Hub that cannot be reached.
    """
    failures: dict[int, SourceError] = {}

    def attempt(index: int) -> Result | None:
        try:
            return work(index, calibration.sources[index])
        except SourceError as failure:
            failures[index] = failure
            return None

    with ThreadPoolExecutor(max_workers=workers) as pool:
        results = list(pool.map(attempt, range(len(calibration.sources))))
    if failures:
        raise _error(dict(sorted(failures.items())), path)
    return [result for result in results if result is not None]


def _error(failures: dict[int, SourceError], path: Path) -> CalibrationError:
    lines, groups = source_lines(path), dict[object, list[int]]()
    for index, failure in failures.items():
        # Usually there is no network, and one source says so as well as fifty.
        together = isinstance(failure, Unreachable)
        groups.setdefault(Unreachable if together else (failure.reason, failure.remedy), []).append(index)
    messages = []
    for cause, (first, *others) in groups.items():
        failure, shown = failures[first], others[: NAMED - 1] if cause is Unreachable else others
        subjects = [failure.subject, *(f"{failures[index].subject} (line {lines[index]})" for index in shown)]
        more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
        messages.append(f"{path}:{lines[first]}: {', '.join(subjects)}{more}: {failure.reason}; {failure.remedy}")
    return CalibrationError("\n".join(messages))
