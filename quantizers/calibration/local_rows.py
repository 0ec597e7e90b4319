"""Rows of a local file: one of the set's folder, or of the data that is shipped."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from quantizers.system.files import file_sha256
from quantizers.system.output_files import DATA
from quantizers.system.shipped import shipped

from .rows import Row, check_columns, file_rows, needed_columns, shuffled
from .set import DataSource
from .source_faults import SourceError


@dataclass
class LocalRows:
    """A `RowSource` that reads a file, whose path is relative to `folder`; its version is the file's hash."""

    source: DataSource
    folder: Path
    seed: str  # of the order of its rows
    unreached: bool = False
    _rows: list[Row] = field(default_factory=list, repr=False)  # empty until the file was read

    def newest(self) -> tuple[str, str]:
        """As `RowSource.newest`."""
        return file_hash(local_file(self.source, self.folder)), ""

    def look(self, pinned: str) -> tuple[str, str]:
        """As `RowSource.look`: all rows are read."""
        version, licence = self.newest()
        if pinned not in ("", version):
            raise SourceError(self.source.dataset, "changed since it was locked", "restore it, or lock the set again")
        self._rows = self._read()
        return version, licence

    def rows(self, version: str) -> list[Row]:
        """As `RowSource.rows`: all of them, at least one; a file has no other version than the one that it has now."""
        return self._rows or self._read()

    def _read(self) -> list[Row]:
        path, columns = local_file(self.source, self.folder), needed_columns(self.source)
        rows = read_local(path, self.source.dataset, columns)
        check_columns(self.source, rows, columns, lambda: read_local(path, self.source.dataset))
        return shuffled(rows, self.source, self.seed)

    def unread_files(self) -> list[str]:
        """As `RowSource.unread_files`: none."""
        return []

    def is_kept(self, version: str) -> bool:
        """As `RowSource.is_kept`: the file itself is here."""
        return True


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


def file_hash(path: Path) -> str:
    """`sha256:…` of a file's bytes. Raises SourceError if it cannot be read."""
    return f"sha256:{hashlib.sha256(read_bytes(path)).hexdigest()}"
