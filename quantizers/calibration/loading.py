"""A calibration set becomes token sequences, each with a category: the same ones on any machine.

One sample is one sequence: nothing is packed, and what is longer than its source's sequence_length
(the set's, where the source gives none) is cut and counted. The digest over all token ids proves that
two runs calibrated on the same.
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

# Called with (samples so far, the source that gave the last one).
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
        path: the set's YAML file; its local files are relative to it.
        tokenizer_source: a model's folder or Hub id; its chat template renders conversations.
        revision: of a tokenizer on the Hub.
        trust_remote_code: whether the tokenizer may bring code of its own.
        workers: sources loaded at the same time; does not change the result.
        progress: called for every sample, from one thread at a time.
        cache: a folder in which results are kept, and found again while set, tokenizer and data are the
            same; where the Hub cannot be asked, what was loaded last. None keeps nothing.
        require_languages: whether the set's `languages.required` is enforced.

    Raises:
        CalibrationError: the set, the tokenizer or sources are wrong or cannot be reached; a line for
            each fault, those of all sources together.
    """
    calibration = read_set(path)
    pins = read_lock(path, calibration)
    renderer = Renderer(tokenizer_source, revision, trust_remote_code)
    notes = ["versions are those of the set's lock"] if pins else []

    def current(index: int, source: DataSource) -> str | SourceError:
        try:
            return version(source, path.parent, pins[index] if pins else None)
        except SourceError as failure:
            return failure  # told with all the others, or not needed where the cache serves

    with _quiet(calibration):
        versions = for_each_source(calibration, path, current, workers)
        fingerprint = renderer.fingerprint()
        data = recall(cache, calibration, fingerprint, versions) if cache else None
        if data is None:
            data = _load(calibration, path, renderer, versions, workers, progress)
            if cache:
                remember(cache, calibration, fingerprint, data)
        else:
            unasked = sum(isinstance(found, SourceError) for found in versions)
            if unasked:  # or it is what loading again would give
                notes.append(f"from the cache; {unasked} sources could not be reached")
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
    failed = any(isinstance(found, SourceError) for found in versions)

    def take(index: int, source: DataSource) -> Taken:
        found = versions[index]
        if isinstance(found, SourceError):
            raise found
        if failed and not source.is_local:
            return Taken([], [])  # the set is refused anyway: look for more faults only where it is quick
        return taker.take(index, found)

    taken = for_each_source(calibration, path, take, workers)
    samples = tuple(sample for one in taken for sample in one.samples)
    return CalibrationData(
        name=calibration.name,
        sequence_length=calibration.sequence_length,
        lengths=calibration.lengths,
        samples=samples,
        digest=digest_of(samples),
        dropped=tuple(dropped for one in taken for dropped in one.dropped),
        versions=tuple(str(found) for found in versions),
    )


def _quiet(calibration: CalibrationSet) -> AbstractContextManager[None]:
    if all(source.is_local for source in calibration.sources):
        return nullcontext()
    from quantizers.calibration.sources.hub import quiet

    return quiet()
