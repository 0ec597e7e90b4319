"""Locks: the exact version of every source, in `NAME.lock.json` next to the set, which runs then use.

A commit on the Hub pins the contents of its files; a local file is compared with the hash in the lock.
"""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from quantizers.system.errors import CalibrationError
from quantizers.system.files import write_text
from quantizers.system.schema import Strict

from .rows import SourceError, for_each_source, local_file, quiet, read_bytes, resolve
from .set import CalibrationSet, DataSource, read_set

NAMED = {"dataset", "subset", "split", "revision"}  # keys of a source that say what it reads


class Pin(Strict):
    """One locked source.

    Attributes:
        dataset, subset, split, revision: as written in the set when it was locked; the set must still agree.
        commit: of a Hub dataset; None for a local file.
        files: of a local file, its name and content hash (`sha256:…`).
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

    def pin(_: int, source: DataSource) -> Pin:
        commit = None if source.is_local else resolve(source)
        files = {source.dataset: file_hash(local_file(source, path.parent))} if source.is_local else {}
        return Pin(**source.model_dump(include=NAMED), commit=commit, files=files)

    calibration = read_set(path)
    with quiet():
        pins = for_each_source(calibration, path, pin, workers)
    lock = Lock(format=1, sources=pins)
    write_text(json.dumps(lock.model_dump(), indent=1, ensure_ascii=False) + "\n", lock_path(path))
    return lock_path(path)


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
    pinned, named = ([one.model_dump(include=NAMED) for one in each.sources] for each in (lock, calibration))
    for pin, source in zip_longest(pinned, named):
        if pin != source:
            raise CalibrationError(f"{locked}: was made for {pin or 'no source'}, the set now has {source}; {again}")
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
    return pin.commit if pin is not None and pin.commit else resolve(source)


def file_hash(path: Path) -> str:
    """`sha256:…` of a file's bytes. Raises SourceError if it cannot be read."""
    return f"sha256:{hashlib.sha256(read_bytes(path)).hexdigest()}"
