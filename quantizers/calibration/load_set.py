"""Loads a calibration set as token sequences with a category each, identical on every machine; nothing is packed.

Every source is looked at before any is read whole, so that the faults of all are reported together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from quantizers.system.errors import CalibrationError
from quantizers.system.files import atomic
from quantizers.system.formatting import several
from quantizers.system.shipped import shipped

from .hub import Hub
from .local_rows import LocalRows, file_hash, local_file
from .lock import Pin, as_locked, pin, read_lock, read_without
from .render import Renderer
from .row_formats import Rejected, instruct, read_row
from .row_source import RowSource, row_source
from .rows import Row
from .samples import CalibrationData, Dropped, Sample, digest_of, missing_languages, subsample, within
from .set import CalibrationSet, DataSource, FromColumn, Kind, fill, placeholders, read_set, seeded, slug
from .source_faults import NAMED, SourceError, for_each_source

WORKERS = 8  # sources loaded at the same time
FORMAT = 8  # of the sets that a run keeps: increase it when the same set gives other tokens or fields
LOADED = TypeAdapter(CalibrationData)
EMBEDDED = "embedded"
# Stop reading a source after this many rows per sample, so that a chat template that refuses every row
# does not read a streamed dataset to its end.
PATIENCE = 50
PATIENCE_AT_LEAST = 1000

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
    run: Path | None = None,
    require_languages: bool = True,
    positions: int | None = None,
    draw: int = 0,
    tokens_by: str = "calibration.tokens",
) -> CalibrationData:
    """Load a calibration or held-out set.

    Args:
        path: the set's YAML file; paths of local files are relative to its folder.
        tokenizer: a model's folder or Hub id; its chat template renders conversations into text.
        trust_remote_code: whether code from the tokenizer's repository may run.
        tokens: draw this many, see `subsample`; None takes the whole set. `tokens_by` names what says so.
        revision: of a tokenizer on the Hub.
        workers: how many sources to load at the same time; does not change the result.
        without: sources to leave out, by their `dataset`; other samples take their place.
        run: a folder of the run that loads the set. The loaded set is kept there, and taken from there as long as
            set, tokenizer and local files are the same, whatever has become of the datasets on the Hub.
        require_languages: whether the set's `languages.required` is enforced.
        positions: of the model, at which every text is cut; None for the limits of the set alone.
        draw: another draw of the set than its own, 0: see `CalibrationSet.drawn_again`. A lock then says which version
            of a source is read, and not which of its rows.

    Raises:
        CalibrationError: the set, the tokenizer or a source is wrong or cannot be reached; a line for each fault.
    """
    import rich.console

    calibration = read_without(path, without).drawn_again(draw)
    with rich.console.Console(stderr=True, force_jupyter=False).status("loading calibration data"):
        renderer = Renderer(str(tokenizer), revision, trust_remote_code)
        own = run and run / f"{_key(calibration, path, without, renderer)}.json"
        data = _read_loaded(own) if own else None
        if data is None:
            with Hub() as hub:
                data = _Loading(calibration, path, workers, hub, without, any_rows=draw > 0).load(renderer)
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
        _require_languages(calibration, data, few, f"raise {tokens_by}")
    return data


def look_at_sources(path: Path, hub: Hub, without: Sequence[str] = ()) -> list[str]:
    """Look at every source of a set, as `load_set` does first; a line for each that would be left out.

    Of a Hub dataset without kept rows that is its repository and its first row, of a local file all rows.

    Raises:
        CalibrationError: the set or a source is wrong or cannot be reached; a line for each fault.
    """
    looking = _Loading(read_without(path, without), path, WORKERS, hub, without)
    looking.each(looking.look)
    return [f"{source.asked.dataset}: {source.left_out}" for source in looking.sources if source.left_out]


def print_notes(data: CalibrationData, what: str = "calibration") -> CalibrationData:
    """Print a set's notes on standard error, each after `what` the set is; returns the set."""
    for note in data.notes:
        print(f"{what}: {note}", file=sys.stderr)
    return data


def pins_of(calibration: CalibrationSet, data: CalibrationData) -> list[Pin]:
    """Return a pin for each source of a loaded set; empty if all are local files, whose published names pin them."""
    if all(source.is_local for source in calibration.sources):
        return []
    return list(map(pin, calibration.sources, data.versions, data.licences, data.rows))


def _require_languages(calibration: CalibrationSet, data: CalibrationData, problem: str, remedy: str) -> None:
    missing = [name for names in missing_languages(calibration, data.samples).values() for name in names]
    if calibration.languages.required and missing:
        dealt = any(name in missing for sample in data.samples for name in sample.asked)
        prompts = " (a prompt that asks for one is no text in it)" if dealt else ""
        raise CalibrationError("", f"{problem} {', '.join(missing)}{prompts}", f"{remedy}, or drop languages.required")


def _key(calibration: CalibrationSet, path: Path, without: Sequence[str], renderer: Renderer) -> str:
    """SHA-256 of what decides a loaded set, but for what the Hub has now; another for a local file that is missing."""
    files = []
    for source in calibration.sources:
        with contextlib.suppress(SourceError):  # which is said when the set is loaded anew
            files += [file_hash(local_file(source, path.parent))] if source.is_local else []
    lock = [pin.model_dump() for pin in read_lock(path, calibration) or ()]
    key = [FORMAT, calibration.model_dump(mode="json"), list(without), renderer.fingerprint(), files, lock]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()


def _read_loaded(file: Path) -> CalibrationData | None:
    """The set that a run has loaded; None if it has not, or the file is damaged."""
    try:
        data = LOADED.validate_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return data if digest_of(data.samples) == data.digest else None


@dataclass
class _Source:
    """One source while its set is loaded."""

    index: int  # its number in the set
    asked: DataSource
    origin: RowSource  # of its rows
    pin: Pin | None  # of the set's lock, if it has one
    left_out: str  # why; empty if it is not
    version: str = ""  # a commit, or the hash of a local file
    licence: str = ""
    tried: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the rows that were tried, by place


class _Loading:
    """One set while it is loaded; with `any_rows` others may be read than its lock says."""

    def __init__(
        self,
        calibration: CalibrationSet,
        path: Path,
        workers: int,
        hub: Hub,
        without: Sequence[str],
        any_rows: bool = False,
    ) -> None:
        self.calibration = calibration
        self.path = path
        self.workers = workers
        self.hub = hub
        pins = read_lock(path, calibration)
        self.locked = pins is not None
        if pins and any_rows:
            pins = [pin.model_copy(update={"rows": {}}) for pin in pins]
        self.sources = list[_Source]()
        for index, asked in enumerate(calibration.sources):
            left_out, pinned = "--without" if asked.dataset in without else "", pins[index] if pins else None
            origin = row_source(asked, path.parent, calibration.order_of(index), hub)
            self.sources.append(_Source(index, asked, origin, pinned, left_out))

    def each(self, work: Callable[[_Source], Result]) -> list[Result | None]:
        """`work(source)` for every source that is not left out; one that is not required is left out if it fails."""

        def attempt(index: int, asked: DataSource) -> Result | None:
            source = self.sources[index]
            if source.left_out:
                return None
            try:
                return work(source)
            except SourceError as failure:
                if asked.required or (source.pin and source.pin.version):
                    raise
                source.left_out = failure.reason
                source.version = ""
                source.licence = ""
                return None

        return for_each_source(self.calibration, self.path, attempt, self.workers)

    def look(self, source: _Source) -> None:
        """Find version and licence of a source, after a look at its rows."""
        if source.pin and not source.pin.version:
            remedy = f"lock it again, or leave it out with --without {source.asked.dataset}"
            raise SourceError(source.asked.dataset, "left out when the set was locked", remedy)
        source.version, licence = source.origin.look(source.pin.version if source.pin else "")
        source.licence = source.asked.licence or (source.pin.licence if source.pin else licence)

    def load(self, renderer: Renderer) -> CalibrationData:
        """Look at every source, then read all of them.

        Of each as many samples are made as the set asks for, in an order that the seed decides: an unusable row is
        counted under its reason, and the next is tried instead; a row whose own category names a language that the set
        does not list is left out, and counted too. Languages are assigned round robin, in an order that the seed
        decides, over all samples of the set that need one.
        """
        calibration, sources = self.calibration, self.sources
        self.each(self.look)
        sampled = [drawn for drawn in self.each(lambda source: self._sample(source, renderer)) if drawn]
        samples = [sample for drawn in sampled for sample in drawn.samples]
        dropped = tuple(rows for drawn in sampled for rows in drawn.dropped)
        notes = ["versions are those of the set's lock"] if self.locked else []
        notes += renderer.notes
        if unreached := sum(source.origin.unreached for source in sources):
            notes.append(f"from rows that were kept; {unreached} sources could not be reached")
        notes += self._file_notes()
        notes += [drawn.shortage for drawn in sampled if drawn.shortage]
        more, replaced = self._substitutes(samples, renderer)
        samples, notes = samples + more, notes + replaced
        if not samples:  # a source with nothing but unusable rows is an error already
            if not dropped:
                raise CalibrationError(self.path, f"no source is left ({'; '.join(notes)})")
            why = f"{dropped[0].first}: {dropped[0].reason}"
            raise CalibrationError(self.path, f"no row is left ({why})", "list their languages")
        return CalibrationData(
            calibration.name,
            calibration.sequence_length,
            calibration.lengths,
            tuple(samples),
            digest_of(samples),
            dropped,
            versions=tuple(source.version for source in sources),
            licences=tuple(source.licence for source in sources),
            rows=tuple(dict(source.tried) for source in sources),
            lock=self.locked,
            notes=tuple(notes),
        )

    def _sample(self, source: _Source, renderer: Renderer, more: int = 0) -> _Sampled:
        rows = as_locked(source.origin.rows(source.version), source.pin)
        sampled = _sample_source(self.calibration, source.index, rows, renderer, more)
        source.tried = sampled.rows
        return sampled

    def _file_notes(self) -> Iterator[str]:
        """Notes about files that are not read, and about rows of the Hub that are not kept."""
        read = [source for source in self.sources if not source.left_out]
        for source in read:
            if unread := source.origin.unread_files():
                yield f"{source.asked.dataset}: not read are {len(unread)} files in another format, such as {unread[0]}"
        if not all(source.origin.is_kept(source.version) for source in read):
            yield (
                "rows of the Hub cannot be kept, and will be asked for again; "
                "set XDG_CACHE_HOME to a writable folder with room"
            )

    def _substitutes(self, taken: Collection[Sample], renderer: Renderer) -> tuple[list[Sample], list[str]]:
        """As many samples as the left-out sources would have given, and what is to be said of each of these sources.

        They are of the other sources of its category that have a number of samples, else of the set `embedded`.
        """
        substitutes = list[Sample]()
        notes = list[str]()
        texts = {sample.text for sample in taken}
        lent = Counter[int]()  # samples that a source gave in place of others'
        for lost in (source for source in self.sources if source.left_out):
            missing = 0 if lost.asked.samples == "all" else lost.asked.samples
            own, others = list[Sample](), list[Sample]()
            for donor in self.sources:
                number, before = donor.asked.samples, lent[donor.index]
                alike = not donor.left_out and donor.asked.category == lost.asked.category
                if alike and number != "all" and len(own) < missing:
                    with contextlib.suppress(SourceError):  # it had enough rows for itself alone
                        more = self._sample(donor, renderer, before + missing - len(own)).samples[number + before :]
                        lent[donor.index] += len(more)
                        own += more
            if len(own) < missing:
                others = _embedded(self.calibration, missing - len(own), texts, renderer)
            texts |= {sample.text for sample in own + others}
            substitutes += own + others
            what = [f"{len(own)} of the same category"] * bool(own) + [f"{len(others)} of {EMBEDDED}"] * bool(others)
            instead = f"{missing} samples are replaced by {' and '.join(what)}" if what else "its samples are missing"
            notes.append(f"without {lost.asked.dataset} ({lost.left_out}): {instead}")
        return substitutes, notes


def _embedded(calibration: CalibrationSet, count: int, texts: Collection[str], renderer: Renderer) -> list[Sample]:
    """At most `count` texts of the embedded set that are not among `texts`, from its sources in turn."""
    path = shipped("calibration") / f"{EMBEDDED}.yaml"
    shared = {key: getattr(calibration, key) for key in ("seed", "languages", "sequence_length")}
    enough = {"samples": count + len(texts), "sequence_length": None}
    sources = tuple(source.model_copy(update=enough) for source in read_set(path).sources)
    embedded, per_source = read_set(path).model_copy(update=shared | {"sources": sources}), []
    for number, source in enumerate(sources):
        with contextlib.suppress(SourceError):  # none of its rows fits the model's template
            rows = LocalRows(source, path.parent, embedded.order_of(number))
            sampled = _sample_source(embedded, number, rows.rows(""), renderer)
            per_source.append([sample for sample in sampled.samples if sample.text not in texts])
    turns = [group[turn] for turn in range(count) for group in per_source if turn < len(group)]
    return turns[:count]


@dataclass(frozen=True)
class _Sampled:
    """Result of sampling one source's rows."""

    samples: tuple[Sample, ...]  # in the order in which they were tried
    dropped: tuple[Dropped, ...]  # the unusable rows, then those left out
    rows: Mapping[str, str]  # SHA-256 of each row that was tried, by place
    shortage: str  # what is to be said if there are fewer samples than were asked for; empty if not


def _sample_source(
    calibration: CalibrationSet, index: int, rows: Iterable[Row], renderer: Renderer, more: int = 0
) -> _Sampled:
    """The samples of source number `index`, of rows in the order in which they are to be tried.

    There are `more` samples than the set asks for. Raises SourceError if the source has no usable rows, or with
    `samples: all` one that is not.
    """
    source, assigned = calibration.sources[index], _assigned(calibration, index)
    wanted = source.samples if source.samples == "all" else source.samples + more
    most_rows = float("inf") if wanted == "all" else max(PATIENCE_AT_LEAST, PATIENCE * wanted)
    samples, tried = list[Sample](), dict[str, str]()
    places = defaultdict[tuple[bool, str], list[str]](list)  # of dropped rows, by whether they are left out, and why
    usable = read = 0  # rows in a listed language; rows that count towards the most
    for row in rows:
        tried[row.place] = "" if source.is_local else row.sha256
        languages = {kind: names[len(samples) % len(names)] for kind, names in assigned.items()}
        usable += 1
        try:
            samples.append(_sample(calibration, index, row, renderer, languages))
        except Rejected as failure:
            unlisted = isinstance(failure, _Unlisted)
            usable -= unlisted
            places[unlisted, str(failure)].append(row.place)
        read = len(tried) if source.streaming else usable
        if len(samples) == wanted or read == most_rows:
            break
    dropped = tuple(Dropped(source.dataset, why, len(at), at[0], out) for (out, why), at in sorted(places.items()))
    shortage = ""
    if len(samples) < (usable if wanted == "all" else wanted):
        asked = f"all {usable}" if wanted == "all" else f"the {source.samples}"
        most = sorted(dropped, key=lambda rejected: -rejected.count)[:NAMED]
        reasons = ", ".join(f"{rejected.reason} ({rejected.count}, first at {rejected.first})" for rejected in most)
        reasons += f" and {several(len(dropped) - NAMED, 'more reason')}" if len(dropped) > NAMED else ""
        reason = f"{len(samples)} of {asked} samples; {reasons or f'it has only {len(tried)} rows'}"
        reason += f"; given up after {len(tried):,} rows" if read == most_rows else ""
        if wanted == "all" or not samples:
            remedy = "correct the rows" if samples else "correct the rows, columns or shape"
            unlisted_too = any(rejected.left_out for rejected in dropped)
            raise SourceError(source.dataset, reason, f"list these languages, {remedy}" if unlisted_too else remedy)
        shortage = f"{source.dataset}: {reason}"
    return _Sampled(tuple(samples), dropped, {} if source.is_local else tried, shortage)


class _Unlisted(Rejected):
    """A row is left out: its own category names a language that the set's list of that kind does not have."""


def _sample(
    calibration: CalibrationSet, index: int, row: Row, renderer: Renderer, languages: dict[Kind, str]
) -> Sample:
    source = calibration.sources[index]
    if isinstance(source.category, FromColumn):
        category = source.category.of(row.values) or ""
        if kind := calibration.languages.unlisted_kind(category):
            what = f"its {source.category.column}" if source.category.under else category
            raise _Unlisted(f"{what} is not in languages.{kind}")
    else:
        category = fill(source.category, {kind: slug(name) for kind, name in languages.items()})
    content = read_row(row.values, source, calibration.order_of(index))
    if source.prompt:
        content = instruct(content, fill(source.prompt, languages))
    if isinstance(source.category, FromColumn) and not category:
        raise Rejected(f"no category in column {source.category.column}")
    rendered = renderer.render(content, calibration.length_of(source))
    named = None if placeholders(source.fixed_category) else calibration.languages.claimed_by(category)[1]
    return Sample(
        tokens=rendered.tokens,
        category=category,
        source=source.dataset,
        truncated=rendered.truncated,
        long=calibration.length_of(source) > calibration.sequence_length,
        languages=(named,) if named else (),
        asked=tuple(languages.values()),
        place=row.place,
        text=content.text,
        left_out=rendered.left_out,
    )


def _assigned(calibration: CalibrationSet, index: int) -> dict[Kind, list[str]]:
    """The languages to assign to a source's samples, round robin, the one of its first sample first."""
    orders: dict[Kind, list[str]] = {}
    *before, source = calibration.sources[: index + 1]
    for kind in source.assigns:
        names = list(calibration.languages.of(kind))
        seeded(f"{calibration.seed}:{kind}").shuffle(names)
        start = sum(other.samples for other in before if kind in other.assigns and other.samples != "all") % len(names)
        orders[kind] = names[start:] + names[:start]
    return orders
