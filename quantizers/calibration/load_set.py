"""Loads a calibration set as token sequences with a category each, identical on every machine.

One sample is one sequence: nothing is packed, and samples longer than their source's sequence_length (the set's, if
the source gives none) are truncated and counted. Equal digests over all token ids prove that two runs were calibrated
on the same data.

Every source is looked at before any is read whole: its repository and its first row; the faults of all sources are
reported together. What was read of the Hub is kept (rows.py), and a run keeps the sets that it has loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from quantizers.system.errors import CalibrationError
from quantizers.system.files import atomic

from .hub_repository import Hub, Repository
from .lock import Pin, as_locked, local_version, pin, read_lock, refuse_unknown
from .render import Renderer
from .row_files import Row
from .rows import files_of, first_row, kept_file, local_rows, newest_kept, rows_at, rows_cache
from .sampler import Sampled, sample_source
from .samples import CalibrationData, asked_for, digest_of, missing_languages, subsample, within
from .set import KINDS, CalibrationSet, DataSource, read_set
from .source_faults import SourceError, Unreachable, for_each_source
from .substitutes import substitutes

WORKERS = 8  # sources loaded at the same time
FORMAT = 7  # of the sets that a run keeps: increase it when the same set gives other tokens or fields
LOADED = TypeAdapter(CalibrationData)

Result = TypeVar("Result")


def load_set(
    path: Path,
    tokenizer: str | Path,
    trust_remote_code: bool = False,
    tokens: int | None = None,
    *,
    revision: str = "main",
    workers: int = WORKERS,
    without: Sequence[str] = (),
    kept: Path | None = None,
    run: Path | None = None,
    require_languages: bool = True,
    positions: int | None = None,
) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file; paths of local files are relative to its folder.
        tokenizer: a model's folder or Hub id; its chat template renders conversations into text.
        trust_remote_code: whether code from the tokenizer's repository may run.
        tokens: draw this many, see `subsample`; None takes the whole set.
        revision: of a tokenizer on the Hub.
        workers: how many sources to load at the same time; does not change the result.
        without: sources to leave out, by their `dataset`; other samples take their place.
        kept: the folder of kept rows; None for the user's own.
        run: a folder of the run that loads the set. The loaded set is kept there, and taken from there as long as
            set, tokenizer and local files are the same, whatever has become of the datasets on the Hub.
        require_languages: whether the set's `languages.required` is enforced.
        positions: of the model, at which every text is cut; None for the limits of the set alone.

    Raises:
        CalibrationError: the set, the tokenizer or a source is wrong or cannot be reached. The message has one
            line for each fault and covers all sources.
    """
    import rich.console

    calibration = read_set(path)
    refuse_unknown(calibration, without, path)
    with rich.console.Console(stderr=True).status("loading calibration data"):
        renderer = Renderer(str(tokenizer), revision, trust_remote_code)
        own = run and run / f"{_key(calibration, path, without, renderer)}.json"
        data = _read_loaded(own) if own else None
        if data is None:
            with Hub() as hub:
                data = _Loading(calibration, path, renderer, workers, kept or rows_cache(), hub, without).load()
            if own:
                own.parent.mkdir(parents=True, exist_ok=True)
                with atomic(own) as stream:
                    stream.write(LOADED.dump_json(data))
    if require_languages:
        _require_languages(calibration, data, f"{path}: no text is in", "add some")
    data = data if positions is None else within(data, positions)
    if tokens is not None:
        data = subsample(data, tokens, calibration.seed)
        few = f"{path}: of {tokens:,} tokens drawn from it none is in"
        _require_languages(calibration, data, few, "raise calibration.tokens")
    return data


def said(data: CalibrationData, what: str = "calibration") -> CalibrationData:
    """A set whose notes are now printed on standard error; `what` it is begins each line."""
    for note in data.notes:
        print(f"{what}: {note}", file=sys.stderr)
    return data


def pins_of(calibration: CalibrationSet, data: CalibrationData) -> list[Pin]:
    """What was read of each source of a loaded set; empty if all are local files, whose published names pin them."""
    if all(source.is_local for source in calibration.sources):
        return []
    figures = zip(calibration.sources, data.versions, data.licences, data.rows, strict=True)
    return [pin(*one) for one in figures]


def _require_languages(calibration: CalibrationSet, data: CalibrationData, problem: str, remedy: str) -> None:
    missing = missing_languages(calibration, data.samples)
    if calibration.languages.required and any(missing.values()):
        names = ", ".join(name for kind in KINDS for name in missing[kind])
        asked = asked_for(calibration, data.samples)
        dealt = any(name in asked[kind] for kind in KINDS for name in missing[kind])
        prompts = " (a prompt that asks for one is no text in it)" if dealt else ""
        raise CalibrationError(f"{problem} {names}{prompts}; {remedy}, or drop languages.required")


def _key(calibration: CalibrationSet, path: Path, without: Sequence[str], renderer: Renderer) -> str:
    """SHA-256 of what decides a loaded set, but for what the Hub has now; another for a local file that is missing."""
    files = []
    for source in calibration.sources:
        with contextlib.suppress(SourceError):  # which is said when the set is loaded anew
            files += [local_version(source, path.parent, None)] if source.is_local else []
    lock = [one.model_dump() for one in read_lock(path, calibration) or ()]
    key = [FORMAT, calibration.model_dump(mode="json"), list(without), renderer.fingerprint(), files, lock]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _read_loaded(file: Path) -> CalibrationData | None:
    """The set that a run has loaded; None if it has not, or the file is damaged."""
    try:
        data = LOADED.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return data if digest_of(data.samples) == data.digest else None


@dataclass(frozen=True)
class _Version:
    """What is read of a source: a commit, or the hash of a local file.

    Attributes:
        repository: of a Hub dataset, if it was asked for.
        pin: of the set's lock, if it has one.
    """

    name: str
    licence: str = ""
    repository: Repository | None = None
    pin: Pin | None = None


class _Loading:
    """One set while it is loaded: which of its sources are left out, and why."""

    def __init__(
        self,
        calibration: CalibrationSet,
        path: Path,
        renderer: Renderer,
        workers: int,
        kept: Path,
        hub: Hub,
        without: Sequence[str],
    ) -> None:
        self.calibration, self.path, self.renderer, self.workers = calibration, path, renderer, workers
        self.kept, self.hub = kept, hub
        self.pins = read_lock(path, calibration)
        named = (index for index, source in enumerate(calibration.sources) if source.dataset in without)
        self.left_out = dict.fromkeys(named, "--without")  # the reasons, by the source's number
        self.unreached: set[int] = set()  # sources of which the rows that were kept last are taken
        self.local: dict[int, list[Row]] = {}  # rows of local files
        self.tried: dict[int, Mapping[str, str]] = {}  # SHA-256 of the rows that were tried, by place

    def load(self) -> CalibrationData:
        """Look at every source, then read all of them."""
        calibration, renderer = self.calibration, self.renderer
        self.versions = self._each(self._look)
        sampled = self._each(self._sample)
        samples = [sample for one in sampled if one for sample in one.samples]
        dropped = tuple(rows for one in sampled if one for rows in one.dropped)
        notes = ["versions are those of the set's lock"] if self.pins else []
        notes += renderer.notes
        if self.unreached:
            notes.append(f"from rows that were kept; {len(self.unreached)} sources could not be reached")
        notes += self._of_files()
        notes += [one.shortage for one in sampled if one and one.shortage]
        if self.left_out:
            reasons = dict(sorted(self.left_out.items()))
            more, replaced = substitutes(calibration, reasons, self._sample, samples, renderer)
            samples, notes = samples + more, notes + replaced
        if not samples:  # a source with nothing but unusable rows is an error already
            raise CalibrationError(
                f"{self.path}: no row is left ({dropped[0].first}: {dropped[0].reason}); list their languages"
                if dropped
                else f"{self.path}: no source is left ({'; '.join(notes)})"
            )
        return CalibrationData(
            calibration.name,
            calibration.sequence_length,
            calibration.lengths,
            tuple(samples),
            digest_of(samples),
            dropped,
            tuple(version.name if version else "" for version in self.versions),
            tuple(version.licence if version else "" for version in self.versions),
            tuple(dict(self.tried.get(index, {})) for index in range(len(sampled))),
            lock=self.pins is not None,
            notes=tuple(notes),
        )

    def _each(self, work: Callable[[int], Result]) -> list[Result | None]:
        """`work(index)` for every source that is not left out; one that is not required is left out if it fails."""

        def attempt(index: int, source: DataSource) -> Result | None:
            if index in self.left_out:
                return None
            try:
                return work(index)
            except SourceError as failure:
                if source.required or (self.pins and self.pins[index].version):
                    raise
                self.left_out[index] = failure.reason
                return None

        return for_each_source(self.calibration, self.path, attempt, self.workers)

    def _look(self, index: int) -> _Version:
        """The version of a source, after a look at its first row, or at all rows of a local file."""
        source, pin = self.calibration.sources[index], self.pins[index] if self.pins else None
        if pin is not None and not pin.version:
            raise SourceError(
                source.dataset,
                "left out when the set was locked",
                f"lock it again, or leave it out with --without {source.dataset}",
            )
        if source.is_local:
            version = _Version(local_version(source, self.path.parent, pin), source.licence or "", pin=pin)
            self.local[index] = local_rows(source, self.path.parent, self.calibration.order_of(index))
            return version
        version = _Version(pin.version, source.licence or pin.licence, pin=pin) if pin else self._current(index, source)
        if not kept_file(self.kept, source, self.calibration.order_of(index), version.name).exists():
            repository = version.repository or self.hub.look_up(source.dataset, version.name)
            first_row(source, repository, self.hub)
            version = replace(version, repository=repository)
        return version

    def _current(self, index: int, source: DataSource) -> _Version:
        """The version of a Hub dataset now; the one that was kept last where the Hub cannot be reached."""
        try:
            repository = self.hub.look_up(source.dataset, source.revision)
        except Unreachable:
            commit = newest_kept(self.kept, source, self.calibration.order_of(index))
            if commit is None:
                raise
            self.unreached.add(index)
            return _Version(commit, source.licence or "")
        return _Version(repository.commit, source.licence or repository.licence, repository)

    def _sample(self, index: int, more: int = 0) -> Sampled:
        source, version = self.calibration.sources[index], self.versions[index]
        assert version is not None
        rows = as_locked(self._rows(index, source, version), version.pin)
        sampled = sample_source(self.calibration, index, rows, self.renderer, more)
        self.tried[index] = sampled.rows
        return sampled

    def _of_files(self) -> Iterator[str]:
        """What is to be said of the files of the datasets on the Hub, and of those that keep their rows."""
        kept = True
        for index, (source, version) in enumerate(zip(self.calibration.sources, self.versions, strict=True)):
            if version is None or source.is_local or index in self.left_out:
                continue
            kept = kept and kept_file(self.kept, source, self.calibration.order_of(index), version.name).exists()
            if repository := version.repository:
                _, unread = files_of(source, repository)
                if unread:
                    yield f"{source.dataset}: not read are {len(unread)} files in another format, such as {unread[0]}"
        if not kept:
            yield (
                "rows of the Hub cannot be kept, and will be asked for again; "
                "set XDG_CACHE_HOME to a writable folder with room"
            )

    def _rows(self, index: int, source: DataSource, version: _Version) -> Iterable[Row]:
        if source.is_local:
            return self.local[index]
        seed = self.calibration.order_of(index)
        return rows_at(source, version.name, seed, self.hub, self.kept, version.repository)
