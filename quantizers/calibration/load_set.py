"""Loads a calibration set as token sequences with a category each, identical on every machine.

One sample is one sequence: nothing is packed, and samples longer than their source's sequence_length (the set's, if
the source gives none) are truncated and counted. Equal digests over all token ids prove that two runs were calibrated
on the same data. A loaded set is cached on disk, for resumed runs, other processes and runs without a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from quantizers.system.errors import CalibrationError
from quantizers.system.files import atomic

from .lock import read_lock, version
from .render import Renderer
from .rows import SourceError, Unreachable, for_each_source, quiet
from .sampler import sample_source
from .samples import CalibrationData, Dropped, Sample, asked_for, digest_of, missing_languages, subsample
from .set import KINDS, CalibrationSet, DataSource, read_set

if TYPE_CHECKING:
    from rich.status import Status

WORKERS = 8  # sources loaded at the same time
FORMAT = 6  # of the cache: increase it when the same set gives other tokens or fields
CACHED = TypeAdapter(CalibrationData)


def load_set(
    path: Path,
    tokenizer: str | Path,
    trust_remote_code: bool = False,
    tokens: int | None = None,
    *,
    revision: str = "main",
    workers: int = WORKERS,
    cache: Path | None = None,
    require_languages: bool = True,
) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file; paths of local files are relative to its folder.
        tokenizer: a model's folder or Hub id; its chat template renders conversations into text.
        trust_remote_code: whether code from the tokenizer's repository may run.
        tokens: draw this many, see `subsample`; None takes the whole set.
        revision: of a tokenizer on the Hub.
        workers: how many sources to load at the same time; does not change the result.
        cache: a folder for loaded sets; None for the user's own. A set is read from it while set, tokenizer and data
            are unchanged, or while the Hub cannot be reached.
        require_languages: whether the set's `languages.required` is enforced.

    Raises:
        CalibrationError: the set, the tokenizer or a source is wrong or cannot be reached. The message has one
            line for each fault and covers all sources.
    """
    import rich.console

    calibration = read_set(path)
    local = all(source.is_local for source in calibration.sources)
    with (
        rich.console.Console(stderr=True).status("loading calibration data") as status,
        contextlib.nullcontext() if local else quiet(),
    ):
        renderer = Renderer(str(tokenizer), revision, trust_remote_code)
        data = _cached_or_loaded(calibration, path, renderer, workers, cache or _default_cache(), status)
    if require_languages:
        _require_languages(calibration, data, f"{path}: no text is in", "add some")
    if tokens is not None:
        data = subsample(data, tokens, calibration.seed)
        few = f"{path}: of {tokens:,} tokens drawn from it none is in"
        _require_languages(calibration, data, few, "raise calibration.tokens")
    return data


def _require_languages(calibration: CalibrationSet, data: CalibrationData, problem: str, remedy: str) -> None:
    missing = missing_languages(calibration, data.samples)
    if calibration.languages.required and any(missing.values()):
        names = ", ".join(name for kind in KINDS for name in missing[kind])
        asked = asked_for(calibration, data.samples)
        dealt = any(name in asked[kind] for kind in KINDS for name in missing[kind])
        prompts = " (a prompt that asks for one is no text in it)" if dealt else ""
        raise CalibrationError(f"{problem} {names}{prompts}; {remedy}, or drop languages.required")


def _cached_or_loaded(
    calibration: CalibrationSet, path: Path, renderer: Renderer, workers: int, cache: Path, status: Status
) -> CalibrationData:
    pins = read_lock(path, calibration)
    notes = ["versions are those of the set's lock"] if pins else []

    def current(index: int, source: DataSource) -> str | SourceError:
        try:
            return version(source, path.parent, pins[index] if pins else None)
        except SourceError as failure:
            return failure  # raised later with those of the other sources, unless the cache has the set

    versions = for_each_source(calibration, path, current, workers)
    failed = sum(isinstance(outcome, SourceError) for outcome in versions)
    key = [FORMAT, calibration.model_dump(mode="json"), renderer.fingerprint()]
    file = cache / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()}.json"
    data = _read_cache(file, versions)
    if data is None:
        data = _load(calibration, path, renderer, versions, workers, status)
        _write_cache(file, data)
    elif failed:  # otherwise loading again would give the same data, so there is nothing to note
        notes.append(f"from the cache; {failed} sources could not be reached")
    return replace(data, lock=pins is not None, notes=tuple(notes))


def _load(
    calibration: CalibrationSet,
    path: Path,
    renderer: Renderer,
    versions: Sequence[str | SourceError],
    workers: int,
    status: Status,
) -> CalibrationData:
    failed = any(isinstance(outcome, SourceError) for outcome in versions)

    def sample(index: int, source: DataSource) -> tuple[list[Sample], list[Dropped]]:
        outcome = versions[index]
        if isinstance(outcome, SourceError):
            raise outcome
        if failed and not source.is_local:
            return [], []  # loading fails anyway, so look for more faults only in local files, which is fast
        status.update(f"calibration: {source.dataset}, source {index + 1} of {len(versions)}")
        return sample_source(calibration, index, path.parent, renderer, outcome)

    sampled = for_each_source(calibration, path, sample, workers)
    samples = tuple(sample for samples, _ in sampled for sample in samples)
    dropped = tuple(rows for _, dropped in sampled for rows in dropped)
    if not samples:  # a source with nothing but unusable rows is an error already
        first = dropped[0]
        raise CalibrationError(f"{path}: no row is left ({first.first}: {first.reason}); list their languages")
    name, length, lengths = calibration.name, calibration.sequence_length, calibration.lengths
    read = tuple(map(str, versions))
    licences = tuple(source.licence or "" for source in calibration.sources)
    return CalibrationData(name, length, lengths, samples, digest_of(samples), dropped, read, licences)


def _default_cache() -> Path:
    """`moe-quantizers/calibration` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "moe-quantizers" / "calibration"


def _read_cache(file: Path, versions: Sequence[str | SourceError]) -> CalibrationData | None:
    """The cached data of the same versions, or None; a source that cannot be reached now matches any version."""
    try:
        data = CACHED.validate_json(file.read_bytes())
        pairs = list(zip(versions, data.versions, strict=True))
    except (OSError, ValueError):
        return None  # missing or damaged: load again
    same = all(isinstance(now, Unreachable) or now == then for now, then in pairs)
    return data if same and digest_of(data.samples) == data.digest else None


def _write_cache(file: Path, data: CalibrationData) -> None:
    """Write a loaded set as JSON. Failing to write is not an error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic(file) as stream:
            stream.write(CACHED.dump_json(data))
