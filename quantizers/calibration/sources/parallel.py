"""Run a function for every source of a set in parallel, and report all failures together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quantizers.calibration.set import CalibrationSet, DataSource, source_lines
from quantizers.system.errors import CalibrationError

from .rows import SourceError

Result = TypeVar("Result")


def for_each_source(
    calibration: CalibrationSet, path: Path, work: Callable[[int, DataSource], Result], workers: int
) -> list[Result]:
    """Call `work(index, source)` for every source in threads; returns the results in the set's order.

    Raises:
        CalibrationError: one line for each reason, naming the set's file and line and every source that failed so.
    """

    def attempt(index: int) -> tuple[list[Result], list[tuple[int, SourceError]]]:
        try:
            return [work(index, calibration.sources[index])], []
        except SourceError as failure:
            return [], [(index, failure)]

    indices = range(len(calibration.sources))
    if workers == 1:
        outcomes = list(map(attempt, indices))
    else:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            outcomes = list(pool.map(attempt, indices))
    if failures := [failure for _, failed in outcomes for failure in failed]:
        raise CalibrationError(_message(failures, path))
    return [result for results, _ in outcomes for result in results]


def _message(failures: list[tuple[int, SourceError]], path: Path) -> str:
    lines = source_lines(path)
    groups: dict[tuple[str, str], list[tuple[int, SourceError]]] = {}
    for index, failure in failures:
        groups.setdefault((failure.reason, failure.remedy), []).append((index, failure))
    messages = []
    for (reason, remedy), members in groups.items():
        first = lines[members[0][0]]
        subjects = [members[0][1].subject]
        subjects += [f"{failure.subject} (line {lines[index]})" for index, failure in members[1:]]
        messages.append(f"{path}:{first}: {', '.join(subjects)}: {reason}; {remedy}")
    return "\n".join(messages)
