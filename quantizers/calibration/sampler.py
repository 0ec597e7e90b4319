"""Samples of one source: as many as the set asks for, in an order that the seed decides.

An unusable row is counted under its reason, and the next row is tried instead. A row whose own category names a
language that the set does not list is left out, and counted too. Languages are assigned round robin, in an order that
the seed decides, over all samples of the set that need one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .render import Renderer
from .row_files import Row
from .row_formats import Rejected, instruct, read_row
from .samples import Dropped, Sample
from .set import CalibrationSet, DataSource, FromColumn, Kind, fill, placeholders, seeded, slug
from .source_faults import SourceError

# Stop reading a source after this many rows per sample, so that a chat template that refuses every row
# does not read a streamed dataset to its end.
PATIENCE = 50
PATIENCE_AT_LEAST = 1000


@dataclass(frozen=True)
class Sampled:
    """What became of one source's rows.

    Attributes:
        samples: in the order in which they were tried.
        dropped: the skipped rows: the unusable ones, then those left out.
        rows: SHA-256 of each row that was tried, by place.
        shortage: what is to be said if there are fewer samples than were asked for; empty if not.
    """

    samples: tuple[Sample, ...]
    dropped: tuple[Dropped, ...]
    rows: Mapping[str, str]
    shortage: str = ""


def sample_source(
    calibration: CalibrationSet, index: int, rows: Iterable[Row], renderer: Renderer, more: int = 0
) -> Sampled:
    """The samples of source number `index`.

    Args:
        rows: of the source, in the order in which they are to be tried.
        more: samples beyond the number that the set asks for, in place of those of another source.

    Raises:
        SourceError: it has no usable rows, or with `samples: all` one that is not.
    """
    source = calibration.sources[index]
    assigned = _assigned(calibration, index)
    wanted = source.samples if source.samples == "all" else source.samples + more
    most_rows = float("inf") if wanted == "all" else max(PATIENCE_AT_LEAST, PATIENCE * wanted)
    samples: list[Sample] = []
    rejected: dict[str, list[str]] = {}  # reason -> places
    left_out: dict[str, list[str]] = {}
    tried: dict[str, str] = {}
    read = 0
    for row in rows:
        tried[row.place] = "" if source.is_local else row.sha256
        if unlisted := _unlisted(calibration, row, source):
            left_out.setdefault(unlisted, []).append(row.place)
        else:
            languages = {kind: names[len(samples) % len(names)] for kind, names in assigned.items()}
            try:
                samples.append(_sample(calibration, index, row, renderer, languages))
            except Rejected as failure:
                rejected.setdefault(str(failure), []).append(row.place)
        read = len(tried) if source.streaming else len(tried) - sum(map(len, left_out.values()))
        if len(samples) == wanted or read == most_rows:
            break
    dropped = tuple(
        Dropped(source.dataset, why, len(at), at[0], left_out=places is left_out)
        for places in (rejected, left_out)
        for why, at in sorted(places.items())
    )
    usable = len(tried) - sum(map(len, left_out.values()))
    shortage = ""
    if len(samples) < (usable if wanted == "all" else wanted):
        fault = _shortfall(source, len(samples), len(tried), dropped, stopped=read == most_rows)
        if wanted == "all" or not samples:
            raise fault
        shortage = f"{source.dataset}: {fault.reason}"
    return Sampled(tuple(samples), dropped, {} if source.is_local else tried, shortage)


def _sample(
    calibration: CalibrationSet, index: int, row: Row, renderer: Renderer, languages: dict[Kind, str]
) -> Sample:
    source = calibration.sources[index]
    content = read_row(row.values, source, calibration.order_of(index))
    if source.prompt:
        content = instruct(content, fill(source.prompt, languages))
    category, rendered = _category(source, row, languages), renderer.render(content, calibration.length_of(source))
    named = None if placeholders(source.fixed_category) else calibration.languages.named_by(category)
    return Sample(
        tokens=rendered.tokens,
        category=category,
        source=source.dataset,
        truncated=rendered.truncated,
        long=calibration.is_long(source),
        languages=(named,) if named else (),
        asked=tuple(languages.values()),
        place=row.place,
        text=content.text,
        left_out=rendered.left_out,
    )


def _unlisted(calibration: CalibrationSet, row: Row, source: DataSource) -> str | None:
    """Why a row is left out: its own category names a language that the set's list of that kind does not have."""
    if not isinstance(source.category, FromColumn) or (category := source.category.of(row.values)) is None:
        return None
    kind = calibration.languages.unlisted_kind(category)
    what = f"its {source.category.column}" if source.category.under else category
    return f"{what} is not in languages.{kind}" if kind else None


def _assigned(calibration: CalibrationSet, index: int) -> dict[Kind, list[str]]:
    """The languages to assign to a source's samples, round robin, the one of its first sample first."""
    orders: dict[Kind, list[str]] = {}
    for kind in calibration.sources[index].assigns:
        names = list(calibration.languages.of(kind))
        seeded(f"{calibration.seed}:{kind}").shuffle(names)
        start = calibration.assigned_before(index, kind) % len(names)
        orders[kind] = names[start:] + names[:start]
    return orders


def _category(source: DataSource, row: Row, assigned: dict[Kind, str]) -> str:
    if not isinstance(source.category, FromColumn):
        return fill(source.category, {kind: slug(name) for kind, name in assigned.items()})
    if (category := source.category.of(row.values)) is None:
        raise Rejected(f"no category in column {source.category.column}")
    return category


def _shortfall(source: DataSource, sampled: int, read: int, dropped: Sequence[Dropped], stopped: bool) -> SourceError:
    left_out = sum(item.count for item in dropped if item.left_out)
    asked = f"all {read - left_out}" if source.samples == "all" else f"the {source.samples}"
    reasons = ", ".join(f"{item.reason} ({item.count}, first at {item.first})" for item in dropped)
    reason = f"{sampled} of {asked} samples; {reasons or f'it has only {read} rows'}"
    reason += f"; given up after {read:,} rows" if stopped else ""
    remedy = "correct the rows" if sampled else "correct the rows, columns or shape"
    remedy = f"list these languages, {remedy}" if left_out else remedy
    return SourceError(source.dataset, reason, remedy)
