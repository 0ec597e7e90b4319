"""The places that rows come from: a new one is a class in a file of its own, and a case of `row_source`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from .hub import Hub
from .hub_rows import HubRows
from .local_rows import LocalRows
from .rows import Row
from .set import DataSource


class RowSource(Protocol):
    """The rows of one source of a set, in the order in which they are tried.

    Every method raises SourceError if the source, its part or a file cannot be read.

    Attributes:
        unreached: whether the place could not be reached, and rows that were kept are taken.
    """

    unreached: bool

    def newest(self) -> tuple[str, str]:
        """The version that the source has now; and its licence, empty if none is known."""

    def look(self, pinned: str) -> tuple[str, str]:
        """Version and licence of what is read, `pinned` or else the newest, after a look at the rows.

        Raises SourceError also if a column is missing, or the pinned version is no more.
        """

    def rows(self, version: str) -> Iterable[Row]:
        """The rows at a version."""

    def unread_files(self) -> list[str]:
        """Files of the source in another format than those that are read."""

    def is_kept(self, version: str) -> bool:
        """Whether rows at a version are on this machine."""


def row_source(source: DataSource, folder: Path, seed: str, hub: Hub) -> RowSource:
    """The rows of a source of a set that lies in `folder`, in the order of a seed."""
    return LocalRows(source, folder, seed) if source.is_local else HubRows(source, seed, hub)
