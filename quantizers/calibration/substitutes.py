"""Samples in place of those of sources that are left out: of other sources in the same category, else of embedded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from quantizers.system.package_data import shipped

from .render import Renderer
from .rows import local_rows
from .sampler import Sampled, sample_source
from .samples import Sample
from .set import CalibrationSet, DataSource, read_set
from .source_faults import SourceError

EMBEDDED = "embedded"


def substitutes(
    calibration: CalibrationSet,
    reasons: Mapping[int, str],
    sample_more: Callable[[int, int], Sampled],
    taken: Collection[Sample],
    renderer: Renderer,
) -> tuple[list[Sample], list[str]]:
    """As many samples as the left-out sources would have given, and what is to be said of each of these sources.

    Args:
        reasons: why sources were left out, by their number.
        sample_more: the samples of a source with so many more than the set asks for.
        taken: the set's own samples.
    """
    found, notes, asked = list[Sample](), list[str](), dict[int, int]()
    texts = {sample.text for sample in taken}
    for index, reason in reasons.items():
        source, begin = calibration.sources[index], len(found)
        missing = 0 if source.samples == "all" else source.samples
        for donor in _donors(calibration, source, reasons):
            before = asked.get(donor, 0)
            number = calibration.sources[donor].samples
            assert number != "all"
            with suppress(SourceError):  # it had enough rows for itself alone
                more = sample_more(donor, before + missing - (len(found) - begin)).samples[number + before :]
                asked[donor] = before + len(more)
                found += more
            if len(found) - begin == missing:
                break
        from_set = len(found) - begin
        if from_set < missing:
            found += _embedded(calibration, missing - from_set, texts, renderer)
        texts |= {sample.text for sample in found[begin:]}
        what = [f"{from_set} of the same category"] * bool(from_set)
        what += [f"{len(found) - begin - from_set} of {EMBEDDED}"] * (len(found) - begin > from_set)
        instead = f"{missing} samples are replaced by {' and '.join(what)}" if what else "its samples are missing"
        notes.append(f"without {source.dataset} ({reason}): {instead}")
    return found, notes


def _donors(calibration: CalibrationSet, source: DataSource, left_out: Collection[int]) -> list[int]:
    """The numbers of the other sources of its category that have a number of samples."""
    return [
        number
        for number, other in enumerate(calibration.sources)
        if number not in left_out and other.category == source.category and other.samples != "all"
    ]


def _embedded(calibration: CalibrationSet, count: int, texts: Collection[str], renderer: Renderer) -> list[Sample]:
    """At most `count` texts of the embedded set that are not among `texts`, from its sources in turn."""
    path = shipped("calibration") / f"{EMBEDDED}.yaml"
    every = read_set(path).model_copy(update={"seed": calibration.seed, "languages": calibration.languages})
    per_source = []
    for number, source in enumerate(every.sources):
        drawn = source.model_copy(update={"samples": count + len(texts), "sequence_length": None})
        sources = (*every.sources[:number], drawn, *every.sources[number + 1 :])
        one = every.model_copy(update={"sources": sources, "sequence_length": calibration.sequence_length})
        with suppress(SourceError):  # none of its rows fits the model's template
            sampled = sample_source(one, number, local_rows(drawn, path.parent, one.order_of(number)), renderer)
            per_source.append([sample for sample in sampled.samples if sample.text not in texts])
    turns = [group[turn] for turn in range(count) for group in per_source if turn < len(group)]
    return turns[:count]
