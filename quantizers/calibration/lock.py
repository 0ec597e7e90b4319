"""Locks: the exact version of every source, in `NAME.lock.json` next to the set, which runs then use.

A local file is pinned by its hash; a Hub dataset by its commit, and by place and hash of the rows that were tried.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from quantizers.system.errors import CalibrationError, did_you_mean
from quantizers.system.files import ready_file, write_text
from quantizers.system.schema import Strict

from .hub import Hub
from .row_source import row_source
from .rows import Row
from .set import CalibrationSet, DataSource, read_set
from .source_faults import SourceError, Unreachable, for_each_source

NAMED = {"dataset", "subset", "split", "revision"}  # keys of a source that say what it reads


class Pin(Strict):
    """One locked source; the first four as written in the set when it was locked, with which it must still agree."""

    dataset: str
    subset: str | None
    split: str
    revision: str | None
    commit: str | None  # of a Hub dataset, empty if it was left out; None for a local file
    licence: str = ""  # of a Hub dataset, as its card named it; empty if it named none
    files: dict[str, str]  # of a local file, its name and content hash (`sha256:…`)
    rows: dict[str, str]  # of a Hub dataset, SHA-256 of the first rows in the order in which they are tried, by place

    @property
    def version(self) -> str:
        """The commit, or the file's hash; empty if the source was left out."""
        return self.commit or next(iter(self.files.values()), "")


class Lock(Strict):
    """The lock file of a set."""

    format: Literal[2]
    digest: str  # SHA-256 over all pins
    sources: list[Pin]


def lock_path(path: Path) -> Path:
    """The path of a set's lock."""
    return path.with_suffix(".lock.json")


def pin(source: DataSource, version: str, licence: str = "", rows: Mapping[str, str] | None = None) -> Pin:
    """The pin of a source that was read at a version: a commit, or the hash of a local file; empty: left out."""
    named = source.model_dump(include=NAMED)
    if source.is_local:
        return Pin(**named, commit=None, files={source.dataset: version}, rows={})
    return Pin(**named, commit=version, licence=licence, files={}, rows=dict(rows or {}))


def lock_text(pins: Sequence[Pin]) -> str:
    """The text of a lock file."""
    lock = Lock(format=2, digest=_digest(pins), sources=list(pins))
    return json.dumps(lock.model_dump(), indent=1, ensure_ascii=False) + "\n"


def _digest(pins: Sequence[Pin]) -> str:
    return hashlib.sha256(json.dumps([pin.model_dump() for pin in pins], sort_keys=True).encode()).hexdigest()


def lock_set(path: Path, workers: int = 8, without: Sequence[str] = ()) -> tuple[Path, dict[str, str]]:
    """Read the first rows of every source, as many as it has samples, and write the set's lock.

    Returns its path, and the sources that it leaves out with the reasons: those of `without`, by their `dataset`, and
    those that the set does not require and that cannot be read. Raises CalibrationError if the set is wrong, the Hub
    cannot be reached, or sources that the set requires cannot be read; it names all of them.
    """
    calibration, left_out = read_without(path, without), dict.fromkeys(without, "--without")
    ready_file(lock_path(path))
    with Hub() as hub:

        def pinned(index: int, source: DataSource) -> Pin:
            if source.dataset in without:
                return pin(source, "")
            try:
                rows = row_source(source, path.parent, calibration.order_of(index), hub)
                version, licence = rows.newest()
                if source.is_local:
                    return pin(source, version)
                first = islice(rows.rows(version), None if source.samples == "all" else source.samples)
                return pin(source, version, source.licence or licence, {row.place: row.sha256 for row in first})
            except SourceError as failure:
                if source.required or isinstance(failure, Unreachable):  # which it may be in an hour
                    raise
                left_out[source.dataset] = failure.reason
                return pin(source, "")

        pins = for_each_source(calibration, path, pinned, workers)
    write_text(lock_text(pins), lock_path(path))
    return lock_path(path), left_out


def read_without(path: Path, without: Sequence[str]) -> CalibrationSet:
    """A set, read by `read_set`. Raises CalibrationError also if it lacks a source to leave out, or has no other."""
    calibration = read_set(path)
    names = [source.dataset for source in calibration.sources]
    for name in without:
        if name not in names:
            raise CalibrationError(path, f"has no source {name}{did_you_mean(name, names)}", "correct --without")
    if set(without) >= set(names):
        raise CalibrationError(path, "--without leaves no source", "leave one in")
    return calibration


def read_lock(path: Path, calibration: CalibrationSet) -> list[Pin] | None:
    """The pins of a set, one for each source in order; None if the set has no lock.

    Raises CalibrationError if the lock is damaged, or the set's sources were changed since.
    """
    locked = lock_path(path)
    again = f"run `quantize calibration lock {path}` again, or remove it"
    try:
        lock = Lock.model_validate_json(locked.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as failure:
        raise CalibrationError(locked, f"not a readable lock ({type(failure).__name__})", again) from None
    if lock.digest != _digest(lock.sources):
        raise CalibrationError(locked, "was changed by hand, and is not what its digest says", again)
    pinned = [pin.model_dump(include=NAMED) for pin in lock.sources]
    named = [source.model_dump(include=NAMED) for source in calibration.sources]
    for pin, source in zip_longest(pinned, named):
        if pin != source:
            raise CalibrationError(locked, f"was made for {pin or 'no source'}, the set now has {source}", again)
    return lock.sources


def as_locked(rows: Iterable[Row], pin: Pin | None) -> Iterator[Row]:
    """The rows of a source, compared with its pin. Raises SourceError, which names the row, if it is another one."""
    for row, locked in zip_longest(rows, (pin.rows if pin else {}).items()):
        if locked and (row is None or (row.place, row.sha256) != locked):
            where = "is missing" if row is None else f"is now {row.place}" if row.place != locked[0] else "has changed"
            raise SourceError(locked[0], f"this row of the lock {where}", "restore the data, or lock the set again")
        yield row
