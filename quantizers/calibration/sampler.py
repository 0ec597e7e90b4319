"""Samples of one source: as many as the set asks for, in an order that the seed decides.

An unusable row is counted under its reason, and the next row is tried instead. A row whose own category names a
language that the set does not list is left out, and counted too. Languages are assigned round robin, in an order that
the seed decides, over all samples of the set that need one.
"""

from __future__ import annotations

from pathlib import Path

from .render import Renderer
from .row_formats import Rejected, instruct, read_row
from .rows import Row, SourceError, read_rows
from .samples import Dropped, Sample
from .set import CalibrationSet, DataSource, FromColumn, Kind, fill, placeholders, seeded, slug

# Stop reading a source after this many rows per sample, so that a chat template that refuses every row
# does not read a streamed dataset to its end.
PATIENCE = 50
PATIENCE_AT_LEAST = 1000


def sample_source(
    calibration: CalibrationSet, index: int, folder: Path, renderer: Renderer, revision: str
) -> tuple[list[Sample], list[Dropped]]:
    """The samples of source number `index`, and its skipped rows: the unusable ones, then those left out.

    Args:
        folder: the folder to which paths of local files are relative.
        revision: the commit of a Hub dataset; a local file has none.

    Raises:
        SourceError: it cannot be read, or has too few usable rows.
    """
    source = calibration.sources[index]
    if not renderer.has_template and (source.shape != "text" or source.prompt):
        reason = "the tokenizer has no chat template to render it with"
        raise SourceError(source.dataset, reason, "take the tokenizer of a chat model")
    seed, assigned = calibration.order_of(index), _assigned(calibration, index)
    wanted = source.samples
    most_rows = float("inf") if wanted == "all" else max(PATIENCE_AT_LEAST, PATIENCE * wanted)
    samples: list[Sample] = []
    rejected: dict[str, list[str]] = {}  # reason -> places
    left_out: dict[str, list[str]] = {}
    read = 0
    for row in read_rows(source, folder, revision, seed):
        if len(samples) == wanted or read == most_rows:
            break
        read += 1
        if unlisted := _unlisted(calibration, row, source):
            left_out.setdefault(unlisted, []).append(row.place)
            continue
        languages = {kind: names[len(samples) % len(names)] for kind, names in assigned.items()}
        try:
            content = read_row(row.values, source, seed)
            if source.prompt:
                content = instruct(content, fill(source.prompt, languages))
            category, tokens = _category(source, row, languages), renderer.tokens(content)
        except Rejected as failure:
            rejected.setdefault(str(failure), []).append(row.place)
            continue
        length = calibration.length_of(source)
        named = None if placeholders(source.fixed_category) else calibration.languages.named_by(category)
        sample = Sample(
            tokens=tokens[:length],
            category=category,
            source=source.dataset,
            truncated=max(0, len(tokens) - length),
            long=calibration.is_long(source),
            languages=(named,) if named else (),
            asked=tuple(languages.values()),
            place=row.place,
            text=content.text,
        )
        samples.append(sample)
    dropped = [
        Dropped(source.dataset, why, len(at), at[0], left_out=places is left_out)
        for places in (rejected, left_out)
        for why, at in sorted(places.items())
    ]
    usable = read - sum(map(len, left_out.values()))
    if len(samples) < (usable if wanted == "all" else wanted):
        raise _shortfall(source, len(samples), read, dropped)
    return samples, dropped


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


def _shortfall(source: DataSource, sampled: int, read: int, dropped: list[Dropped]) -> SourceError:
    left_out = sum(item.count for item in dropped if item.left_out)
    asked = f"all {read - left_out}" if source.samples == "all" else f"the {source.samples}"
    reasons = ", ".join(f"{item.reason} ({item.count}, first at {item.first})" for item in dropped)
    reason = f"{sampled} of {asked} samples; {reasons or f'it has only {read} rows'}"
    remedy = f"correct the rows, or ask for at most {sampled}" if sampled else "correct the rows, columns or shape"
    remedy = f"list these languages, {remedy}" if left_out else remedy
    return SourceError(source.dataset, reason, remedy)
