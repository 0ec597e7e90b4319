"""Faults of a set's sources: found in all of them at the same time, and reported together with their lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantizers.system.errors import CalibrationError
from quantizers.system.strict_yaml import parse

from .set import CalibrationSet, DataSource

NAMED = 5  # sources, or reasons, that a message names at most
EVERY = 30.0  # seconds between two lines about the sources that are still being read

Result = TypeVar("Result")


@dataclass
class SourceError(Exception):
    """A source cannot be used. Sources with equal reason and remedy are shown in one line."""

    subject: str  # the dataset, or the data file and line
    reason: str
    remedy: str


class Unreachable(SourceError):
    """The Hub cannot be reached now; rows that were kept may do."""


def for_each_source(
    calibration: CalibrationSet, path: Path, work: Callable[[int, DataSource], Result], workers: int
) -> list[Result]:
    """Call `work(index, source)` for every source in threads; returns the results in the set's order.

    What takes longer than EVERY is named on standard error. An interrupt does not wait for the threads. Raises
    CalibrationError: one line for each reason, naming the set's file and line and the sources that failed so; and one
    line for all sources on the Hub that cannot be reached.
    """
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        futures = {pool.submit(work, index, source): source for index, source in enumerate(calibration.sources)}
        left: Collection[Future[Result]] = futures
        while left:
            done, left = wait(left, timeout=EVERY, return_when=FIRST_COMPLETED)
            if not done:
                names = [futures[future].dataset for future in left if future.running()]
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                read = f"calibration: {len(futures) - len(left)} of {len(futures)} sources read; reading"
                print(f"{read} {', '.join(names[:NAMED])}{more}", file=sys.stderr, flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    failures, results = dict[int, SourceError](), list[Result]()
    for index, future in enumerate(futures):
        try:
            results.append(future.result())
        except SourceError as failure:
            failures[index] = failure
    if failures:
        raise _error(failures, path)
    return results


def _error(failures: dict[int, SourceError], path: Path) -> CalibrationError:
    groups = dict[tuple[object, str], list[int]]()
    for index, failure in failures.items():
        # Usually there is no network, and one source says so as well as fifty.
        kind = Unreachable if isinstance(failure, Unreachable) else failure.reason
        groups.setdefault((kind, failure.remedy), []).append(index)
    places = parse(path, CalibrationError)[1]
    errors, lines = [], {index: places["sources", index] for index in failures}
    for (cause, _), (first, *others) in groups.items():
        failure, shown = failures[first], others[: NAMED - 1] if cause is Unreachable else others
        subjects = [failure.subject, *(f"{failures[index].subject} (line {lines[index]})" for index in shown)]
        more = f" and {len(others) - len(shown)} more" if len(others) > len(shown) else ""
        where = f"{path}:{lines[first]}: {', '.join(subjects)}{more}"
        errors.append(CalibrationError(where, failure.reason, failure.remedy))
    return CalibrationError.several(errors)
