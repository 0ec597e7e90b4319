"""The exceptions of this program: what is wrong, where, and what to do; each class knows the exit code of `quantize`.

0 done · 1 the run failed · 2 the input is wrong · 3 a gate failed (not an exception: the output is complete), or
the recipe stopped the run after a layer · 130 and 143 interrupted. The text of an error is one line, and with --json
it is printed as an object too; a traceback is printed only with --debug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self


class QuantizeError(Exception):
    """The run failed for a reason outside the input: disk, device, a bug in a library.

    Args:
        place: file and line, key, option or tensor, as a user knows it; may be empty.
        problem: what is wrong there.
        remedy: what to do about it; may be empty.
    """

    exit_code = 1
    _several: tuple[QuantizeError, ...] = ()

    def __init__(self, place: object, problem: str, remedy: str = "") -> None:
        super().__init__(place, problem, remedy)
        self.place = str(place)
        self.problem = problem
        self.remedy = remedy

    @classmethod
    def several(cls, errors: Sequence[Self]) -> Self:
        """One error for all mistakes that were found at once, each of which is a line of its text."""
        if len(errors) == 1:
            return errors[0]
        whole = cls("", "\n".join(map(str, errors)))
        whole._several = tuple(single for error in errors for single in error.errors)
        return whole

    @property
    def errors(self) -> tuple[QuantizeError, ...]:
        """The error itself, or those of which `several` made it."""
        return self._several or (self,)

    @property
    def without_remedy(self) -> str:
        """Place and problem."""
        return f"{self.place}: {self.problem}" if self.place else self.problem

    def __str__(self) -> str:
        return f"{self.without_remedy}; {self.remedy}" if self.remedy else self.without_remedy

    def as_dict(self) -> dict[str, Any]:
        """As JSON: exit code, place, problem and remedy."""
        return {"code": self.exit_code, "place": self.place, "problem": self.problem, "remedy": self.remedy}


class InputError(QuantizeError):
    """The user's input is wrong. The error names file, line or key, and the remedy."""

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


class Stopped(QuantizeError):
    """A recipe's `verify.stop` ended the run after a layer; the output is unfinished, and the run can be resumed."""

    exit_code = 3


class DamagedRecord(QuantizeError):
    """A finished folder's report.json is damaged, so its files cannot be checked; this counts as a difference."""

    exit_code = 3


class Interrupted(QuantizeError):
    """SIGINT or SIGTERM arrived; all finished work is on disk. The exit code is 128 + the signal's number."""

    def __init__(self, place: object, problem: str, remedy: str, signal_number: int) -> None:
        super().__init__(place, problem, remedy)
        self.exit_code = 128 + signal_number


class PeerFailed(QuantizeError):
    """Another process of the same run failed and printed why; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("", "another process failed")
        self.exit_code = exit_code


def from_dicts(sent: Iterable[Mapping[str, Any]]) -> QuantizeError:
    """The error of another process, from `as_dict` of each of its `errors`; of its class only the exit code is kept."""
    errors = []
    for fields in sent:
        error = QuantizeError(fields["place"], fields["problem"], fields["remedy"])
        error.exit_code = fields["code"]
        errors.append(error)
    whole = QuantizeError.several(errors)
    whole.exit_code = errors[0].exit_code
    return whole


def first_line(failure: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return next(iter(str(failure).strip().splitlines()), type(failure).__name__)


MOST = 3  # names suggested where several begin with the given one
BEGUN = 3  # letters of a beginning, at least


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean group_size?)`: up to MOST known names that begin with this one, or else the most similar."""
    names = {word.lower(): word for word in known}
    begun = [word for word in sorted(names) if len(name) >= BEGUN and word.startswith(name.lower())]
    similar = sorted(begun, key=len)[:MOST] or difflib.get_close_matches(name.lower(), names, n=1)
    return f" (did you mean {' or '.join(names[word] for word in similar)}?)" if similar else ""
