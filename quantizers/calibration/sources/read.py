"""Read the rows of any source, in the order that the set asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizers.calibration.set import DataSource

from .rows import Row, SourceError, check_columns, local_file, order, without_none


def read_rows(source: DataSource, folder: Path, revision: str, seed: str) -> Iterator[Row]:
    """The rows of a source: in file order for `samples: all`, else shuffled with the seed.

    A streamed dataset is shuffled as `datasets` does it: the order of its files, and the rows within a buffer
    that holds eight rows for each sample asked for.

    Args:
        source: the source.
        folder: the folder to which the path of a local file is relative.
        revision: the commit of a Hub dataset; a local file has none.
        seed: with the data, the only thing that decides the order.

    Raises:
        SourceError: the source cannot be read, or lacks a column.
    """
    if source.is_local:
        rows = file_rows(local_file(source, folder), source.dataset)
        check_columns(source, {column for row in rows for column in row.values})
        return (rows[index] for index in order(len(rows), source, seed))
    from .hub import hub_rows

    return hub_rows(source, revision, seed)


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
