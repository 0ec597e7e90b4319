"""Loads a calibration set as token sequences with a category each, identical on every machine.

One sample is one sequence: nothing is packed, and samples longer than their source's sequence_length (the set's, if
the source gives none) are truncated and counted. Equal digests over all token ids prove that two runs were calibrated
on the same data. A loaded set is cached on disk, for resumed runs, other processes and runs without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from quantizers.system.errors import CalibrationError

from .lock import read_lock, version
from .render import Renderer
from .rows import SourceError, Unreachable, for_each_source
from .sampler import Sampled, Sampler
from .samples import CalibrationData, Dropped, Sample, digest_of, missing_languages
from .set import KINDS, CalibrationSet, DataSource, read_set
from .subsample import subsample

if TYPE_CHECKING:
    from rich.console import Console

# Called with the number of samples so far and the name of the source of the last one.
Progress = Callable[[int, str], None]
WORKERS = 8  # sources loaded at the same time
FORMAT = 4  # of the cache: increase it when the same set gives other tokens or fields


def load_set(
    path: Path,
    tokenizer: str | Path,
    trust_remote_code: bool = False,
    tokens: int | None = None,
    *,
    revision: str = "main",
    workers: int = WORKERS,
    progress: Progress | None = None,
    cache: Path | None = None,
    require_languages: bool = True,
) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file; paths of local files are relative to its folder.
        tokenizer: a model's folder or Hub id; its chat template renders conversations into text.
        trust_remote_code: whether code from the tokenizer's repository may run.
        tokens: draw this many, see subsample.py; None takes the whole set.
        revision: of a tokenizer on the Hub.
        workers: how many sources to load at the same time; does not change the result.
        progress: called for every sample, from one thread at a time; None shows a line on a terminal.
        cache: a folder for loaded sets; None for the user's own. A set is read from it while set, tokenizer and data
            are unchanged, or while the Hub cannot be reached.
        require_languages: whether the set's `languages.required` is enforced.

    Raises:
        CalibrationError: the set, the tokenizer or a source is wrong or cannot be reached. The message has one
            line for each fault and covers all sources.
    """
    calibration = read_set(path)
    with progress_line() if progress is None else nullcontext(progress) as show, _quiet(calibration):
        renderer = Renderer(str(tokenizer), revision, trust_remote_code)
        data = _cached_or_loaded(calibration, path, renderer, workers, show, cache or default_cache())
    if require_languages:
        _require_languages(calibration, data, f"{path}: no sample shows", "add samples")
    if tokens is not None:
        data = subsample(data, tokens, calibration.seed)
        _require_languages(
            calibration, data, f"{path}: of {tokens:,} tokens drawn from it none shows", "raise calibration.tokens"
        )
    return data


def _require_languages(calibration: CalibrationSet, data: CalibrationData, problem: str, remedy: str) -> None:
    missing = missing_languages(calibration, data.samples)
    if calibration.languages.required and any(missing.values()):
        names = ", ".join(name for kind in KINDS for name in missing[kind])
        raise CalibrationError(f"{problem} {names}; {remedy}, or drop languages.required")


def _cached_or_loaded(
    calibration: CalibrationSet, path: Path, renderer: Renderer, workers: int, progress: Progress, cache: Path
) -> CalibrationData:
    pins = read_lock(path, calibration)
    notes = ["versions are those of the set's lock"] if pins else []

    def current(index: int, source: DataSource) -> str | SourceError:
        try:
            return version(source, path.parent, pins[index] if pins else None)
        except SourceError as failure:
            return failure  # raised later with those of the other sources, unless the cache has the set

    versions = for_each_source(calibration, path, current, workers)
    file = cache / f"{_key(calibration, renderer)}.parquet"
    data = _read_cache(file, calibration, versions)
    unreachable = sum(isinstance(outcome, SourceError) for outcome in versions)
    if data is None:
        data = _load(calibration, path, renderer, versions, workers, progress)
        _write_cache(file, data)
    elif unreachable:  # otherwise loading again would give the same data, so there is nothing to note
        notes.append(f"from the cache; {unreachable} sources could not be reached")
    return replace(data, lock=pins is not None, notes=tuple(notes))


def _load(
    calibration: CalibrationSet,
    path: Path,
    renderer: Renderer,
    versions: Sequence[str | SourceError],
    workers: int,
    progress: Progress,
) -> CalibrationData:
    lock, count = Lock(), 0

    def accepted(dataset: str) -> None:
        nonlocal count
        with lock:
            count += 1
            progress(count, dataset)

    sampler = Sampler(calibration, path.parent, renderer, accepted)
    failed = any(isinstance(outcome, SourceError) for outcome in versions)

    def sample(index: int, source: DataSource) -> Sampled:
        outcome = versions[index]
        if isinstance(outcome, SourceError):
            raise outcome
        if failed and not source.is_local:
            return Sampled([], [])  # loading fails anyway, so look for more faults only in local files, which is fast
        return sampler.sample(index, outcome)

    sampled = for_each_source(calibration, path, sample, workers)
    samples = tuple(sample for result in sampled for sample in result.samples)
    dropped = tuple(dropped for result in sampled for dropped in result.dropped)
    if not samples:  # a source with nothing but unusable rows is an error already
        first = dropped[0]
        raise CalibrationError(f"{path}: no row is left ({first.first}: {first.reason}); list their languages")
    return _data(calibration, samples, dropped, tuple(map(str, versions)))


def _data(
    calibration: CalibrationSet, samples: tuple[Sample, ...], dropped: tuple[Dropped, ...], versions: tuple[str, ...]
) -> CalibrationData:
    name, length, lengths = calibration.name, calibration.sequence_length, calibration.lengths
    return CalibrationData(name, length, lengths, samples, digest_of(samples), dropped, versions)


def _quiet(calibration: CalibrationSet) -> AbstractContextManager[None]:
    if all(source.is_local for source in calibration.sources):
        return nullcontext()
    from .hub import quiet

    return quiet()


def default_cache() -> Path:
    """`moe-quantizers/calibration` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moe-quantizers" / "calibration"


def _key(calibration: CalibrationSet, renderer: Renderer) -> str:
    settings = calibration.model_dump(mode="json", exclude={"name"})
    text = json.dumps([FORMAT, settings, renderer.fingerprint()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_cache(
    file: Path, calibration: CalibrationSet, versions: Sequence[str | SourceError]
) -> CalibrationData | None:
    """The cached data of the same versions, or None; a source that cannot be reached now matches any version."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
        about = json.loads(table.schema.metadata[b"set"])
        agree = (
            isinstance(now, Unreachable) or now == then for now, then in zip(versions, about["versions"], strict=True)
        )
        if not all(agree):
            return None
        rows = ((row, np.asarray(row["tokens"], np.int32)) for row in table.to_pylist())
        samples = tuple(
            Sample(**row | {"tokens": tokens, "languages": tuple(row["languages"])}) for row, tokens in rows
        )
        dropped = tuple(Dropped(**row) for row in about["dropped"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or damaged: load again
    data = _data(calibration, samples, dropped, tuple(about["versions"]))
    return data if data.digest == about["digest"] else None


def _write_cache(file: Path, data: CalibrationData) -> None:
    """Write a row for each sample, and the rest as JSON in the metadata. Failing to write is not an error."""
    import pyarrow.parquet

    about = {"versions": data.versions, "digest": data.digest, "dropped": [asdict(row) for row in data.dropped]}
    rows = [{field.name: getattr(sample, field.name) for field in fields(Sample)} for sample in data.samples]
    table = pyarrow.Table.from_pylist(rows).replace_schema_metadata({"set": json.dumps(about)})
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, temporary)
        os.replace(temporary, file)
    except OSError:
        return


@contextmanager
def progress_line(console: Console | None = None) -> Iterator[Progress]:
    """A line on a terminal's standard error while a set loads; without a terminal nothing is shown."""
    import rich.console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = console or rich.console.Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading calibration data")
        yield lambda count, dataset: bar.update(task, description=f"calibration: {count:,} samples, now {dataset}")
