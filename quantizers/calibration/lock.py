"""Locks: the exact commit and file hashes of every source, in `NAME.lock.json` next to the set.

A run uses the lock if there is one. A commit on the Hub pins the contents of its files; a local file is
compared with the hash in the lock.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from quantizers.system.errors import CalibrationError
from quantizers.system.files import file_sha256, write_text
from quantizers.system.schema import Strict

from .rows import SourceError, for_each_source, local_file
from .set import CalibrationSet, DataSource, read_set

NAMED = ("dataset", "subset", "split", "revision")  # keys of a source that say what it reads


class Pin(Strict):
    """One locked source.

    Attributes:
        dataset, subset, split, revision: as written in the set when it was locked; the set must still agree.
        commit: of a Hub dataset; None for a local file.
        files: path to content hash (`sha256:…`, or `git:…` for small files of the Hub).
    """

    dataset: str
    subset: str | None
    split: str
    revision: str | None
    commit: str | None
    files: dict[str, str]


class Lock(Strict):
    """The lock file of a set."""

    format: Literal[1]
    sources: list[Pin]


def lock_path(path: Path) -> Path:
    """The path of a set's lock."""
    return path.with_suffix(".lock.json")


def lock_set(path: Path, workers: int = 8) -> Path:
    """Write the lock of a set, with one request to the Hub for every source; returns the lock's path.

    Raises:
        CalibrationError: the set is wrong, or sources cannot be reached; the message names all of them.
    """
    from .hub import file_hashes, quiet, resolve

    def pin(_: int, source: DataSource) -> Pin:
        if source.is_local:
            commit, files = None, {source.dataset: file_hash(local_file(source, path.parent))}
        else:
            commit = resolve(source)
            files = file_hashes(source, commit)
        named = source.model_dump(include=set(NAMED))
        return Pin(**named, commit=commit, files=files)

    calibration = read_set(path)
    with quiet():
        pins = for_each_source(calibration, path, pin, workers)
    target = lock_path(path)
    lock = Lock(format=1, sources=pins)
    write_text(json.dumps(lock.model_dump(), indent=1, ensure_ascii=False) + "\n", target)
    return target


def read_lock(path: Path, calibration: CalibrationSet) -> list[Pin] | None:
    """The pins of a set, one for each source in order; None if the set has no lock.

    Raises:
        CalibrationError: the lock is damaged, or the set's sources were changed since.
    """
    locked = lock_path(path)
    again = f"run `quantize calibration lock {path}` again, or remove it"
    try:
        lock = Lock.model_validate_json(locked.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as failure:
        raise CalibrationError(f"{locked}: not a readable lock ({type(failure).__name__}); {again}") from None
    if len(lock.sources) != len(calibration.sources):
        counts = f"{len(lock.sources)} sources, the set {len(calibration.sources)}"
        raise CalibrationError(f"{locked}: has {counts}; {again}")
    for pin, source in zip(lock.sources, calibration.sources, strict=True):
        for key in NAMED:
            if getattr(pin, key) != getattr(source, key):
                change = f"{key} was {getattr(pin, key)}, the set now says {getattr(source, key)}"
                raise CalibrationError(f"{locked}: {pin.dataset}: {change}; {again}")
    return lock.sources


def version(source: DataSource, folder: Path, pin: Pin | None) -> str:
    """The version of a source's data: the hash of a local file, the commit of a Hub dataset.

    Raises:
        Unreachable: there is no lock, and the Hub cannot be reached.
        SourceError: a local file is missing, or differs from the locked one.
    """
    if source.is_local:
        digest = file_hash(local_file(source, folder))
        if pin is not None and pin.files.get(source.dataset) != digest:
            raise SourceError(source.dataset, "changed since it was locked", "restore it, or lock the set again")
        return digest
    if pin is not None and pin.commit:
        return pin.commit
    from .hub import resolve

    return resolve(source)


def file_hash(path: Path) -> str:
    """`sha256:…` of a file's bytes."""
    try:
        return f"sha256:{file_sha256(path)}"
    except OSError as failure:
        problem = failure.strerror or str(failure)
        raise SourceError(str(path), f"cannot be read ({problem})", "give an existing file") from None
