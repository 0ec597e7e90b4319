"""How many tokens the sequences of a set have at most, before any of its data is read."""

from __future__ import annotations

from pathlib import Path

from quantizers.calibration.set import DataSource, read_set


def longest_possible(path: Path) -> list[int] | None:
    """Tokens of every sequence of a set if each is as long as its source allows; None if the set must be read to know.

    Args:
        path: of the set's YAML file.
    """
    calibration = read_set(path)
    lengths: list[int] = []
    for source in calibration.sources:
        samples = _most_samples(source, path.parent)
        if samples is None:
            return None
        lengths += [calibration.length_of(source)] * samples
    return lengths


def cut_to(lengths: list[int], tokens: int) -> list[int]:
    """The sequences of a part of a set with so many tokens, the last one cut."""
    part: list[int] = []
    for length in lengths:
        if tokens <= 0:
            break
        part.append(min(length, tokens))
        tokens -= length
    return part


def _most_samples(source: DataSource, folder: Path) -> int | None:
    """Upper bound for a source's samples; None if it would have to be read to know."""
    if source.samples != "all":
        return source.samples
    file = folder / source.dataset
    if not source.is_local or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())
