"""The shipped sets: what they hold, and a copy of one with everything that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from quantizers.system.errors import CalibrationError, OutputError
from quantizers.system.own_files import HELD_OUT
from quantizers.system.shipped import shipped

from .set import CalibrationSet, read_set
from .sources.lock import lock_path
from .sources.read import read_rows


def rows() -> list[dict[str, str]]:
    """One row for every shipped set, sorted by name: name, samples, where its sources are, and what it holds."""
    return [_row(path) for path in sorted(shipped("calibration").glob("*.yaml"))]


def _row(path: Path) -> dict[str, str]:
    calibration = read_set(path)
    local = sum(source.is_local for source in calibration.sources)
    hub = len(calibration.sources) - local
    places = [f"{local} local" if local else "", f"{hub} on the Hub" if hub else ""]
    return {
        "name": path.stem,
        "samples": _samples(calibration, path.parent),
        "sources": ", ".join(filter(None, places)),
        "about": _about(path),
    }


def _samples(calibration: CalibrationSet, folder: Path) -> str:
    """How many samples a set asks for; of a Hub dataset of which it takes all rows the number is not known."""
    counts = [
        source.samples
        if source.samples != "all" or not source.is_local
        else sum(1 for _ in read_rows(source, folder, "", ""))
        for source in calibration.sources
    ]
    total = sum(count for count in counts if count != "all")
    return f"{total:,} and more" if "all" in counts else f"{total:,}"


def _about(path: Path) -> str:
    """The first sentence of the comment with which the file begins."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.removeprefix("#").strip() for line in comment).partition(". ")[0].rstrip(".")


def copy_set(name: str, folder: Path) -> list[Path]:
    """Copy a shipped set with its data and lock, and the held-out set that a check compares it with, with its data.

    The files keep their places relative to each other, and so the samples: the order of a local file's rows depends on
    its name in the set. Files that are there already with the same bytes stay.

    Returns:
        The copies, the set itself first.

    Raises:
        CalibrationError: no shipped set has this name.
        OutputError: a file is there that differs, or one cannot be written; then nothing was copied.
    """
    path = shipped("calibration") / f"{name.removesuffix('.yaml')}.yaml"
    if Path(name).name != name or not path.is_file():
        raise CalibrationError(f"{name}: no such set; `quantize calibration list` lists them")
    sets = dict.fromkeys(each for each in (path, path.parent / HELD_OUT) if each.is_file())
    wanted = dict.fromkeys(file for each in sets for file in _files(each))
    contents = {folder / file.relative_to(path.parent): file.read_bytes() for file in wanted}
    write_together(contents)
    return list(contents)


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write files, all or none of them, and overwrite nothing; one that is there with the same bytes stays.

    Raises:
        OutputError: one is there and differs, or cannot be written.
    """
    for target, content in contents.items():
        if target.exists() and not (target.is_file() and target.read_bytes() == content):
            raise OutputError(f"{target}: exists, and is another file; give another name or folder")
    written: list[Path] = []
    try:
        for target, content in contents.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                written.append(target)
                target.write_bytes(content)
    except OSError as failure:
        for target in written:
            target.unlink(missing_ok=True)
        raise OutputError(f"{failure.filename}: cannot be written ({failure.strerror}); give another place") from None


def _files(path: Path) -> list[Path]:
    """A set's file, its lock if it has one, and its local data."""
    data = [source.dataset for source in read_set(path).sources if source.is_local]
    locks = [lock_path(path)] if lock_path(path).is_file() else []
    return [path, *locks, *(Path(os.path.normpath(path.parent / name)) for name in data)]
