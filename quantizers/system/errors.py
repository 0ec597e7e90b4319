"""The exceptions of this program; each class knows the exit code of `quantize`.

0 done · 1 the run failed · 2 the input is wrong · 3 a gate failed (not an exception: the output is complete), or
the recipe stopped the run after a layer · 130 and 143 interrupted. The message is one line that names the place
and the remedy; a traceback is printed only with --debug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantizeError(Exception):
    """The run failed for a reason outside the input: disk, device, a bug in a library."""

    exit_code = 1


class InputError(QuantizeError):
    """The user's input is wrong. The message names file, line or key, and the remedy."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe cannot be read or does not match its schema."""


class CalibrationError(InputError):
    """A calibration set or one of its sources is wrong or cannot be reached."""


class ArchitectureError(InputError):
    """There is no architecture spec for this model family, or config.json contradicts it."""


class CheckpointError(InputError):
    """A checkpoint folder, index, shard or tensor is missing or wrong."""


class OutputError(InputError):
    """The output folder cannot be used for this run."""


class HubUnavailable(QuantizeError):
    """The Hub does not answer, or not now; the same request may succeed later."""

    problem = ""  # the message without its remedy


class Stopped(QuantizeError):
    """A recipe's `verify.stop` ended the run after a layer; the output is unfinished, and the run can be resumed."""

    exit_code = 3


class DamagedRecord(QuantizeError):
    """A finished folder's report.json is damaged, so its files cannot be checked; this counts as a difference."""

    exit_code = 3


class Interrupted(QuantizeError):
    """SIGINT or SIGTERM arrived; all finished work is on disk. The exit code is 128 + the signal's number."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class PeerFailed(QuantizeError):
    """Another process of the same run failed and printed why; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process failed")
        self.exit_code = exit_code


def first_line(failure: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(failure).strip().splitlines()), type(failure).__name__)


MOST = 3  # names suggested where several begin with the given one
BEGUN = 3  # letters of a beginning, at least


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean group_size?)`: up to MOST known names that begin with this one, or else the most similar."""
    names = {one.lower(): one for one in known}
    begun = [one for one in sorted(names) if len(name) >= BEGUN and one.startswith(name.lower())]
    near = sorted(begun, key=len)[:MOST] or difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {' or '.join(names[one] for one in near)}?)" if near else ""
