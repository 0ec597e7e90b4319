"""Run a function for every source of a set in parallel, and report all failures together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quantizers.calibration.set import CalibrationSet, DataSource, source_lines
from quantizers.system.errors import CalibrationError

from .rows import SourceError, Unreachable

Result = TypeVar("Result")


def for_each_source(
    calibration: CalibrationSet, path: Path, work: Callable[[int, DataSource], Result], workers: int
) -> list[Result]:
    """Call `work(index, source)` for every source in threads; returns the results in the set's order.

    Raises:
        CalibrationError: one line for each reason, naming the set's file and line and every source that failed so; and
            one line for all sources on the Hub that cannot be reached. A note of the exception, which a traceback
            shows, has a line for each of them.
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
    failures = [failure for _, failed in outcomes for failure in failed]
    if failures:
        lines = source_lines(path)
        unreachable = [(index, failure) for index, failure in failures if isinstance(failure, Unreachable)]
        wrong = [(index, failure) for index, failure in failures if not isinstance(failure, Unreachable)]
        messages = _by_reason(wrong, path, lines)
        if unreachable:
            asked = sum(not source.is_local for source in calibration.sources)
            messages.append(_out_of_reach(unreachable, asked, path, lines))
        error = CalibrationError("\n".join(messages))
        for index, failure in unreachable:
            error.add_note(f"{path}:{lines[index]}: {failure.subject}: {failure.reason}")
        raise error
    return [result for results, _ in outcomes for result in results]


def _out_of_reach(failures: list[tuple[int, Unreachable]], asked: int, path: Path, lines: list[int]) -> str:
    """One line for all sources out of reach: most often there is no network, which one of them says as well as 50."""
    index, first = failures[0]
    more, others = ("first: ", "; --debug lists them") if len(failures) > 1 else ("", "")
    return (
        f"{path}:{lines[index]}: {len(failures)} of {asked} sources on the Hub cannot be reached "
        f"({more}{first.subject}: {first.reason}); {first.remedy}{others}"
    )


def _by_reason(failures: list[tuple[int, SourceError]], path: Path, lines: list[int]) -> list[str]:
    groups: dict[tuple[str, str], list[tuple[int, SourceError]]] = {}
    for index, failure in failures:
        groups.setdefault((failure.reason, failure.remedy), []).append((index, failure))
    messages = []
    for (reason, remedy), members in groups.items():
        first = lines[members[0][0]]
        subjects = [members[0][1].subject]
        subjects += [f"{failure.subject} (line {lines[index]})" for index, failure in members[1:]]
        messages.append(f"{path}:{first}: {', '.join(subjects)}: {reason}; {remedy}")
    return messages
