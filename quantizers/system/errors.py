"""One exception tree; each class knows the exit code that `quantize` ends with.

0 done · 1 the run failed · 2 what was given is wrong · 3 a gate failed (not an exception: the
output is finished) · 130 and 143 interrupted. The message is one line that names the place and
the remedy; a traceback is printed only with --debug.
"""

from __future__ import annotations


class QuantizeError(Exception):
    """The run failed for a reason outside the input: disk, device, a bug in a library."""

    exit_code = 1


class InputError(QuantizeError):
    """What the user gave is wrong. The message names file, line or key, and the remedy."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe cannot be read or does not fit its schema."""


class CalibrationError(InputError):
    """A calibration set, or a source it names, is wrong or cannot be reached."""


class ArchitectureError(InputError):
    """A model family without facts here, or a config.json that contradicts them."""


class CheckpointError(InputError):
    """A checkpoint folder, index, shard or tensor is missing or wrong."""


class OutputError(InputError):
    """The output folder cannot take this run."""


class DamagedRecord(QuantizeError):
    """A finished folder's report.json is damaged, so that what it names cannot be compared: something differs."""

    exit_code = 3


class Interrupted(QuantizeError):
    """SIGINT or SIGTERM arrived; everything finished so far is on disk.

    Args:
        signal_number: the signal, from which the exit code 128 + n follows.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class PeerFailed(QuantizeError):
    """Another process of the same run failed, and has said why; this one ends with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process failed")
        self.exit_code = exit_code
