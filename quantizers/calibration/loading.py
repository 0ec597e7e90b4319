"""Load a calibration set as token sequences with a category each, identical on every machine.

One sample is one sequence: nothing is packed, and samples longer than their source's sequence_length
(the set's, if the source gives none) are truncated and counted. The digest over all token ids proves that
two runs were calibrated on the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock

from quantizers.calibration.sources.cache import recall, remember
from quantizers.calibration.sources.lock import read_lock, version
from quantizers.calibration.sources.parallel import for_each_source
from quantizers.calibration.sources.rows import SourceError
from quantizers.system.errors import CalibrationError

from .data import CalibrationData, digest_of, missing_languages
from .set import KINDS, CalibrationSet, DataSource, read_set
from .take import Taken, Taker
from .tokens import Renderer

# Called with the number of samples so far and the name of the source of the last one.
Progress = Callable[[int, str], None]


def load_samples(
    path: Path,
    tokenizer_source: str,
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    workers: int = 1,
    progress: Progress | None = None,
    cache: Path | None = None,
    require_languages: bool = True,
) -> CalibrationData:
    """Load a calibration set.

    Args:
        path: the set's YAML file; paths of local files are relative to its folder.
        tokenizer_source: a model's folder or Hub id; its chat template renders conversations into text.
        revision: of a tokenizer on the Hub.
        trust_remote_code: whether code from the tokenizer's repository may run.
        workers: how many sources to load at the same time; does not change the result.
        progress: called for every sample, from one thread at a time.
        cache: a folder for loaded sets. A set is read from it while set, tokenizer and data are unchanged, or
            while the Hub cannot be reached. None disables the cache.
        require_languages: whether the set's `languages.required` is enforced.

    Raises:
        CalibrationError: the set, the tokenizer or a source is wrong or cannot be reached. The message has one
            line for each fault and covers all sources.
    """
    calibration = read_set(path)
    pins = read_lock(path, calibration)
    renderer = Renderer(tokenizer_source, revision, trust_remote_code)
    notes = ["versions are those of the set's lock"] if pins else []

    def current(index: int, source: DataSource) -> str | SourceError:
        try:
            return version(source, path.parent, pins[index] if pins else None)
        except SourceError as failure:
            return failure  # raised later with those of the other sources, unless the cache has the set

    with _quiet(calibration):
        versions = for_each_source(calibration, path, current, workers)
        fingerprint = renderer.fingerprint()
        data = recall(cache, calibration, fingerprint, versions) if cache else None
        if data is None:
            data = _load(calibration, path, renderer, versions, workers, progress)
            if cache:
                remember(cache, calibration, fingerprint, data)
        else:
            unreachable = sum(isinstance(outcome, SourceError) for outcome in versions)
            if unreachable:  # otherwise loading again would give the same data, so there is nothing to note
                notes.append(f"from the cache; {unreachable} sources could not be reached")
    data = replace(data, lock=pins is not None, notes=tuple(notes))
    missing = missing_languages(calibration, data.samples)
    if require_languages and calibration.languages.required and any(missing.values()):
        names = ", ".join(name for kind in KINDS for name in missing[kind])
        raise CalibrationError(f"{path}: no sample shows {names}; add samples, or drop languages.required")
    return data


def _load(
    calibration: CalibrationSet,
    path: Path,
    renderer: Renderer,
    versions: list[str | SourceError],
    workers: int,
    progress: Progress | None,
) -> CalibrationData:
    lock, count = Lock(), 0

    def accepted(dataset: str) -> None:
        nonlocal count
        with lock:
            count += 1
            if progress:
                progress(count, dataset)

    taker = Taker(calibration, path.parent, renderer, accepted)
    failed = any(isinstance(outcome, SourceError) for outcome in versions)

    def take(index: int, source: DataSource) -> Taken:
        outcome = versions[index]
        if isinstance(outcome, SourceError):
            raise outcome
        if failed and not source.is_local:
            return Taken([], [])  # loading fails anyway, so look for more faults only in local files, which is fast
        return taker.take(index, outcome)

    taken = for_each_source(calibration, path, take, workers)
    samples = tuple(sample for result in taken for sample in result.samples)
    if not samples:  # a source with nothing but unusable rows is an error already
        first = taken[0].dropped[0]
        raise CalibrationError(f"{path}: no row is left ({first.first}: {first.reason}); list their languages")
    return CalibrationData(
        name=calibration.name,
        sequence_length=calibration.sequence_length,
        lengths=calibration.lengths,
        samples=samples,
        digest=digest_of(samples),
        dropped=tuple(dropped for result in taken for dropped in result.dropped),
        versions=tuple(str(outcome) for outcome in versions),
    )


def _quiet(calibration: CalibrationSet) -> AbstractContextManager[None]:
    if all(source.is_local for source in calibration.sources):
        return nullcontext()
    from quantizers.calibration.sources.hub import quiet

    return quiet()
