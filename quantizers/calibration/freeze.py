"""A frozen set: the rows that became a set's samples, as local files, and a set that makes the same samples of them.

It needs neither the Hub nor what the data sets hold by then: with the same tokenizer its digest is that of the set.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from quantizers.system.errors import CalibrationError
from quantizers.system.files import write_new
from quantizers.system.strict_yaml import dump

from .hub_repository import Hub
from .licences import is_non_commercial
from .load_set import WORKERS, load_set
from .row_files import Row
from .rows import local_rows, needed_columns, rows_at, shuffled
from .samples import CalibrationData
from .set import CalibrationSet, DataSource, read_set
from .source_faults import for_each_source

LICENCES = "LICENCES.md"


@dataclass(frozen=True)
class FrozenSource:
    """One source of a frozen set.

    Attributes:
        source: of the original set.
        file: its rows, relative to the frozen set.
        seed: of the order of its rows, see `CalibrationSet.order_of`.
        version: the commit or file hash that was read.
        licence: that the set or the card on the Hub names; empty if neither does.
        rows: the needed columns of those that became samples, in the samples' order.
    """

    source: DataSource
    file: str
    seed: str
    version: str
    licence: str
    rows: tuple[dict[str, Any], ...]


def freeze_set(
    path: Path, folder: Path, *, workers: int = WORKERS, kept: Path | None = None, **tokenizer: Any
) -> tuple[list[Path], list[FrozenSource], str]:
    """Write the rows of a set to `folder/data`, the set that reads them, and where they come from with their licences.

    Args:
        folder: created if needed; nothing in it is overwritten.
        kept: the folder of kept rows; None for the user's own.
        tokenizer: the arguments of `load_set` that name it. Its chat template decides which rows are usable.

    Returns:
        The files, the set first; its sources; and the digest that both sets have.

    Raises:
        CalibrationError: the set is wrong, or a source cannot be read.
        OutputError: a file is there that differs, or one cannot be written; then nothing was written.
    """
    options: dict[str, Any] = {"workers": workers, "kept": kept, "require_languages": False, **tokenizer}
    calibration, data = read_set(path), load_set(path, **options)
    for source, version in zip(calibration.sources, data.versions, strict=True):
        if not version:
            raise CalibrationError(f"{path}: {source.dataset} could not be read; remove it to freeze the others")
    frozen = [one for one in _frozen_sources(calibration, path, data, workers, kept) if one.rows]
    contents = {folder / f"{path.stem}.yaml": _set_text(calibration, frozen)}
    contents |= {folder / one.file: _json_lines(one) for one in frozen}
    contents[folder / LICENCES] = _licences_text(calibration, frozen)
    write_new({file: text.encode("utf-8", "backslashreplace") for file, text in contents.items()})
    files = list(contents)
    if (digest := load_set(files[0], **options).digest) != data.digest:
        raise CalibrationError(f"{files[0]}: its samples are not those of {path}; report it with both sets")
    return files, frozen, digest


def _frozen_sources(
    calibration: CalibrationSet, path: Path, data: CalibrationData, workers: int, kept: Path | None
) -> list[FrozenSource]:
    left = list(reversed(data.samples))

    def tried(index: int, source: DataSource) -> Iterable[Row]:
        seed = calibration.order_of(index)
        if source.is_local:
            return local_rows(source, path.parent, seed)
        return list(islice(rows_at(source, data.versions[index], seed, hub, kept), len(data.rows[index])))

    with Hub() as hub:
        every = for_each_source(calibration, path, tried, workers)
    frozen = []
    for index, (source, rows) in enumerate(zip(calibration.sources, every, strict=True)):
        columns, chosen = needed_columns(source), list[dict[str, Any]]()
        for row in rows:
            here = (source.dataset, row.place)
            if left and (left[-1].source, left[-1].place) == here and len(chosen) != source.samples:
                left.pop()
                chosen.append({name: row.values[name] for name in columns if name in row.values})
        name = PurePosixPath(source.dataset)
        file = f"data/{index + 1:02}-{name.stem if source.is_local else name.name}.jsonl"
        version, licence = data.versions[index], data.licences[index]
        frozen.append(FrozenSource(source, file, calibration.order_of(index), version, licence, tuple(chosen)))
    return frozen


def _json_lines(frozen: FrozenSource) -> str:
    """The rows as JSON lines, in the order of which the seed makes that of the samples."""
    places = shuffled(list(range(len(frozen.rows))), frozen.source, frozen.seed)
    placed = dict(zip(places, frozen.rows, strict=True))
    return "".join(json.dumps(placed[place], ensure_ascii=False) + "\n" for place in sorted(placed))


def _set_text(calibration: CalibrationSet, frozen: Sequence[FrozenSource]) -> str:
    """The set with files for sources. Each keeps its number of samples, on which the assigned languages depend."""
    of_hub = {"subset": None, "revision": None, "split": "train", "streaming": False, "required": True}
    sources = tuple(
        one.source.model_copy(
            update={"dataset": f"./{one.file}", "licence": one.licence or None, "order": one.seed, **of_hub}
        )
        for one in frozen
    )
    values = calibration.model_copy(update={"sources": sources}).model_dump(mode="json", exclude_none=True)
    about = f"# The rows of {calibration.name}, by `quantize calibration freeze`. Their licences: {LICENCES}\n"
    return about + dump(values, width=120, short_in_one_line=True)


def _licences_text(calibration: CalibrationSet, frozen: Sequence[FrozenSource]) -> str:
    lines = []
    for one in frozen:
        name, licence = one.source.dataset, one.licence or "none named"
        origin = f"[{name}](https://huggingface.co/datasets/{name}/tree/{one.version})"
        if one.source.is_local:
            origin = f"`{name}`"
        restricted = ", **not for commercial use**" if is_non_commercial(one.licence) else ""
        lines.append(f"| {one.file} | {len(one.rows)} | {origin} | {one.version} | {licence}{restricted} |\n")
    return f"""\
# Where the rows of {calibration.name} come from

Each licence is the one that the set names, or the card of the data set at this commit. It binds whoever passes these
rows on.

| file | rows | from | version | licence |
|---|---:|---|---|---|
{"".join(lines)}"""
