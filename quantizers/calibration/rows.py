"""Rows of a source in the order in which they are tried, which the data and the seed decide and nothing else.

    local file        the file's order for `samples: all`, else all of its rows, shuffled
    Hub               the same over the files of the split
    Hub, streaming    the files shuffled; of these as much as is needed, shuffled in blocks of four rows for each
                      sample asked for

The rows of a Hub dataset that were read are kept in the user's cache, by dataset, commit and order. They depend neither
on a tokenizer nor on other sources: what is kept is never asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from quantizers.system.caches import user_cache
from quantizers.system.files import file_sha256
from quantizers.system.output_files import DATA
from quantizers.system.package_data import shipped

from .hub_files import data_files
from .hub_repository import Hub, Repository
from .row_files import Row, file_rows
from .set import DataSource, FromColumn, seeded
from .source_faults import SourceError

BLOCK_ROWS = 4  # rows that are shuffled together in a streamed dataset, and kept together, per sample asked for
BLOCK = 1 << 20  # bytes of a streamed file that are read at a time; of others eight times as many
FORMAT = 2  # of kept rows: increase it when the same dataset, commit and order give other rows
Item = TypeVar("Item")
DAMAGED = "tell its maker, or leave it out: --without ID, or remove it from the set"


def local_rows(source: DataSource, folder: Path, seed: str) -> list[Row]:
    """The rows of a local file, at least one.

    Args:
        folder: the folder to which the file's path is relative.

    Raises:
        SourceError: it cannot be read, has no rows, or no row has a column that is needed.
    """
    path = local_file(source, folder)
    rows = read_local(path, source.dataset, needed_columns(source))
    _check_columns(source, rows, lambda: read_local(path, source.dataset), needed_columns(source))
    return shuffled(rows, source, seed)


def read_local(path: Path, place: str, columns: list[str] | None = None) -> list[Row]:
    """All rows of a local file; see `file_rows`. Raises SourceError also if it has none, or cannot be opened."""
    with io.BytesIO(read_bytes(path)) as stream:
        rows = list(file_rows(stream, str(path), place, columns))
    if not rows:
        raise SourceError(str(path), "no rows", "add some")
    return rows


def needed_columns(source: DataSource) -> list[str]:
    """The columns that the source's shape and category read."""
    columns = list(source.columns)
    if source.shape == "code-contests":
        columns += ["description", "solutions"]
    if isinstance(source.category, FromColumn):
        columns.append(source.category.column)
    return list(dict.fromkeys(columns))


def shuffled(items: list[Item], source: DataSource, seed: str) -> list[Item]:
    """Items in the order in which a source's rows are tried; in their own for `samples: all`."""
    order = list(range(len(items)))
    if source.samples != "all":
        seeded(seed).shuffle(order)
    return [items[index] for index in order]


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


def files_of(source: DataSource, repository: Repository) -> tuple[list[str], list[str]]:
    """The files of a source on the Hub, and those in another format; see `data_files`."""
    return data_files(repository.files, repository.card, source.subset, source.split, source.revision)


def hub_rows(
    source: DataSource, repository: Repository, hub: Hub, seed: str, first_only: bool = False
) -> Iterator[list[Row]]:
    """The rows of a Hub dataset in blocks, each of which is read when it is asked for.

    Args:
        first_only: a first look at a few rows.

    Raises:
        SourceError: there is no such subset or split, a file cannot be read, or it lacks a column.
    """
    try:
        files, _ = files_of(source, repository)
    except ValueError as failure:
        remedy = "correct the source's subset, split or revision"
        raise SourceError(source.dataset, str(failure), remedy) from None
    part = source.streaming and source.samples != "all"
    if part:
        seeded(f"{seed}:files").shuffle(files)
    columns = needed_columns(source)
    read = (row for file in files for row in _remote_rows(source, repository, hub, file, columns))
    rows = read if part else iter(shuffled(list(read), source, seed))
    size = None if source.samples == "all" else BLOCK_ROWS * source.samples
    number = 0
    while block := list(islice(rows, size)):
        number += 1
        if number == 1:
            checked = columns[:1] if first_only else columns  # others may be missing from a few rows
            _check_columns(source, block, lambda: _remote_rows(source, repository, hub, files[0], None), checked)
        yield shuffled(block, source, f"{seed}:{number}") if part else block
    if not number:
        raise SourceError(source.dataset, "no rows", "correct the source's subset, split or revision")


def _remote_rows(
    source: DataSource, repository: Repository, hub: Hub, file: str, columns: list[str] | None
) -> Iterator[Row]:
    place, raw = f"{source.dataset}/{file}", hub.open(repository, file)
    if file.endswith(".parquet"):  # which is read in pieces here and there
        return file_rows(raw, place, place, columns, DAMAGED)
    buffered = io.BufferedReader(raw, BLOCK if source.streaming else 8 * BLOCK)
    return file_rows(buffered, place, place, columns, DAMAGED)


def _check_columns(
    source: DataSource, rows: list[Row], every: Callable[[], Iterable[Row]], columns: Sequence[str]
) -> None:
    """Refuse a source of which no row has one of the columns.

    Args:
        every: rows with all of their columns, to name them.
    """
    present = {column for row in rows for column in row.values}
    for column in columns:
        if column not in present:
            names = {name for row in islice(every(), len(rows)) for name in row.values}
            reason = f"no column {column!r} (it has {', '.join(sorted(names))})"
            raise SourceError(source.dataset, reason, "correct the source's columns or category")


def first_row(source: DataSource, repository: Repository, hub: Hub) -> Row:
    """The first row of a Hub dataset's first file, read without the rest.

    Raises:
        SourceError: as `hub_rows`; a column may only be missing from this row.
    """
    one = source.model_copy(update={"streaming": True, "samples": 1})
    return next(hub_rows(one, repository, hub, "", first_only=True))[0]


def rows_at(
    source: DataSource, commit: str, seed: str, hub: Hub, kept: Path | None = None, found: Repository | None = None
) -> Iterator[Row]:
    """The rows of a Hub dataset at a commit, from those that were kept as far as they go.

    Args:
        kept: the folder of kept rows; None for the user's own.
        found: its repository at the commit, if the Hub was asked for it already.

    Raises:
        SourceError: as `hub_rows`.
    """
    file = kept_file(kept or rows_cache(), source, seed, commit)
    return kept_rows(file, lambda: hub_rows(source, found or hub.look_up(source.dataset, commit), hub, seed))


def rows_cache() -> Path:
    """The user's own folder of kept rows; where there is no cache folder, one that cannot be made."""
    return (user_cache() or Path(os.devnull)) / "moe-quantizers" / "rows"


def kept_file(folder: Path, source: DataSource, seed: str, commit: str) -> Path:
    """Where the rows of a Hub dataset are kept at a commit."""
    asked = source.model_dump(mode="json", include={"dataset", "subset", "split", "revision", "streaming", "samples"})
    key = json.dumps([FORMAT, asked, needed_columns(source), seed], sort_keys=True)
    return folder / hashlib.sha256(key.encode()).hexdigest()[:32] / f"{commit}.jsonl"


def newest_kept(folder: Path, source: DataSource, seed: str) -> str | None:
    """The commit at which rows of a Hub dataset were kept last; None if there are none."""
    files = kept_file(folder, source, seed, "any").parent.glob("*.jsonl")
    return max(files, key=lambda file: file.stat().st_mtime, default=Path("")).stem or None


def kept_rows(file: Path, fresh: Callable[[], Iterator[list[Row]]]) -> Iterator[Row]:
    """The rows that were kept in a file, and then fresh ones, each block of which is kept as soon as it was read.

    Args:
        fresh: all blocks from the first on; called only if those in the file are used up.
    """
    kept, writable = 0, True
    for block in _kept_blocks(file):
        if not block:
            return  # the end of the dataset
        kept += 1
        yield from block
    for number, block in enumerate(chain(islice(fresh(), kept, None), [list[Row]()]), kept):
        line = {"block": number, "rows": [[row.place, row.values] for row in block]}
        if writable:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(f"\n{json.dumps(line)}\n")  # what was cut off before stays in a line of its own
            except OSError:  # the disk is full, or read-only; that the file is missing is said at the end
                writable = False
                with contextlib.suppress(OSError):
                    file.unlink()
        yield from block


def _kept_blocks(file: Path) -> Iterator[list[Row]]:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        wanted = 0
        for text in stream:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that was cut off
                line = json.loads(text)
                if line["block"] == wanted:
                    wanted += 1
                    yield [Row(place, values) for place, values in line["rows"]]
