"""Rows of a data set on the Hub, read only as far as they are asked for.

Those that were read are kept in the user's cache, by dataset, commit and order; they depend neither on a tokenizer nor
on other sources.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from quantizers.system.caches import user_cache

from .hub import Hub, RemoteFile, Repository, data_files
from .rows import Row, check_columns, file_rows, needed_columns, shuffled
from .set import DataSource, seeded
from .source_faults import SourceError, Unreachable

BLOCK_ROWS = 4  # rows that are shuffled together in a streamed dataset, and kept together, per sample asked for
BLOCK = 1 << 20  # bytes of a streamed file that are read at a time; of others eight times as many
FORMAT = 2  # of kept rows: increase it when the same dataset, commit and order give other rows
WRONG_PART = "correct the source's subset, split or revision"
DAMAGED = "tell its maker, or leave it out: --without ID, or remove it from the set"


@dataclass
class HubRows:
    """A `RowSource` that reads a data set on the Hub; its version is a commit.

    Attributes:
        repository: at the commit that is read, if the Hub was asked for it.
        unreached: whether the Hub could not be reached, and the rows that were kept last are taken.
    """

    source: DataSource
    seed: str  # of the order of its rows
    hub: Hub
    repository: Repository | None = None
    unreached: bool = False

    def newest(self) -> tuple[str, str]:
        """As `RowSource.newest`."""
        self.repository = self.hub.look_up(self.source.dataset, self.source.revision)
        return self.repository.commit, self.repository.licence

    def look(self, pinned: str) -> tuple[str, str]:
        """As `RowSource.look`: the first row is read, unless rows were kept.

        The version is the one now; where the Hub cannot be reached, the one that was kept last.
        """
        version, licence = pinned, ""
        if not pinned:
            try:
                version, licence = self.newest()
            except Unreachable:
                version = self._newest_kept()
                if not version:
                    raise
                self.unreached = True
        if not self.is_kept(version):
            self.repository = self.repository or self.hub.look_up(self.source.dataset, version)
            _look_at_first_row(self.source, self.repository, self.hub)
        return version, licence

    def rows(self, version: str) -> Iterator[Row]:
        """As `RowSource.rows`: those that were kept, then fresh ones, which are kept as they are read."""
        file = self._kept_file(version)
        kept = 0
        writable = True
        for block in _kept_blocks(file):
            if not block:
                return  # the end of the dataset
            kept += 1
            yield from block
        repository = self.repository or self.hub.look_up(self.source.dataset, version)
        fresh = _hub_rows(self.source, repository, self.hub, self.seed)
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

    def unread_files(self) -> list[str]:
        """As `RowSource.unread_files`; none if the Hub was not asked."""
        return _files_of(self.source, self.repository)[1] if self.repository else []

    def is_kept(self, version: str) -> bool:
        """As `RowSource.is_kept`."""
        return self._kept_file(version).exists()

    def _kept_file(self, version: str) -> Path:
        """The file for the rows at a commit; where there is no cache folder, one that cannot be made."""
        keys = {"dataset", "subset", "split", "revision", "streaming", "samples"}
        asked = self.source.model_dump(mode="json", include=keys)
        key = json.dumps([FORMAT, asked, needed_columns(self.source), self.seed], sort_keys=True)
        folder = (user_cache() or Path(os.devnull)) / "moe-quantizers" / "rows"
        return folder / hashlib.sha256(key.encode()).hexdigest()[:32] / f"{version}.jsonl"

    def _newest_kept(self) -> str:
        """The commit at which rows were kept last; empty if there are none."""
        files = self._kept_file("any").parent.glob("*.jsonl")
        return max(files, key=lambda file: file.stat().st_mtime, default=Path("")).stem


def _files_of(source: DataSource, repository: Repository) -> tuple[list[str], list[str]]:
    """The files of a source on the Hub, and those in another format; see `data_files`."""
    return data_files(repository.files, repository.card, source.subset, source.split, source.revision)


def _kept_blocks(file: Path) -> Iterator[list[Row]]:
    with suppress(OSError), file.open("rb") as stream:
        wanted = 0
        for text in stream:
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut off
                line = json.loads(text)
                if line["block"] == wanted:
                    wanted += 1
                    yield [Row(place, values) for place, values in line["rows"]]


def _look_at_first_row(source: DataSource, repository: Repository, hub: Hub) -> None:
    """Read the first row of a data set's first file.

    Raises SourceError as `RowSource.look`; of the columns only the first must be in the row.
    """
    first = source.model_copy(update={"streaming": True, "samples": 1})
    next(_hub_rows(first, repository, hub, "", checked=1))


def _hub_rows(
    source: DataSource, repository: Repository, hub: Hub, seed: str, checked: int | None = None
) -> Iterator[list[Row]]:
    """The rows of a Hub dataset in blocks, each of which is read when it is asked for.

    The first block must have the first `checked` of the needed columns; all of them for None.
    """
    try:
        files, _ = _files_of(source, repository)
    except ValueError as failure:
        raise SourceError(source.dataset, str(failure), WRONG_PART) from None
    partly = source.streaming and source.samples != "all"
    if partly:
        seeded(f"{seed}:files").shuffle(files)
    columns = needed_columns(source)
    read = (row for file in files for row in _remote_rows(source, repository, hub, file, columns))
    rows = read if partly else iter(shuffled(list(read), source, seed))
    size, number = None if source.samples == "all" else BLOCK_ROWS * source.samples, 0
    while block := list(islice(rows, size)):
        number += 1
        if number == 1:  # a column may be missing from a few rows
            check_columns(source, block, columns[:checked], lambda: _remote_rows(source, repository, hub, files[0]))
        yield shuffled(block, source, f"{seed}:{number}") if partly else block
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
