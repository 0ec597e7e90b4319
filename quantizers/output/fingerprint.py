"""The fingerprint of unfinished work: what decides bytes must be what it was when the work was begun."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantizers.system.errors import OutputError
from quantizers.system.files import write_json

LIBRARIES = ("torch", "transformers")  # of the machine's part


def refuse_changes(work: Path, fingerprint: dict[str, Any], output: Path, name: str = "run.json") -> None:
    """Write the fingerprint of a new run, or compare it with that of the run to resume.

    Args:
        name: name of the fingerprint's file.

    Raises:
        OutputError: a setting that decides bytes differs; the message has the old and the new value.
    """
    path = work / name
    if not path.exists():
        write_json(path, fingerprint)
        return
    try:
        old = json.loads(path.read_text())
    except ValueError:
        raise OutputError(f"{path}: cannot be read; start over with --fresh") from None
    changes = list(differences(old, json.loads(json.dumps(fingerprint))))
    # Report a changed device first, because other differences follow from it, and the digest of the calibration data
    # last, because it follows from others.
    for key, before, now in sorted(changes, key=lambda one: (not one[0].endswith(".device"), one[0] == "calibration")):
        raise OutputError(
            f"{output}: holds an unfinished run with another {key} ({short_value(before)}, now {short_value(now)}); "
            f"{_remedy(key, before)}, or start over with --fresh"
        )


def _remedy(key: str, before: Any) -> str:
    """How a setting gets the value back that it had when the run began."""
    last = key.rpartition(".")[2]
    if not key.startswith("machine.") or before is None:
        return "restore it"
    if last == "threads":
        return f"set OMP_NUM_THREADS={before}"
    if last == "device":
        return "give --device cpu" if before == "cpu" else f"go on with the device {before}"
    return f"install {last} {before}" if last in LIBRARIES else "restore it"


def begun_with(work: Path, name: str = "run.json") -> dict[str, Any]:
    """The machine's part of the fingerprint of the run to resume; empty if there is none.

    Args:
        name: name of the fingerprint's file.
    """
    try:
        machine = json.loads((work / name).read_text())["machine"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return machine if isinstance(machine, dict) else {}


def differences(old: Any, new: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every leaf that differs: its dotted key, the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from differences(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    elif old != new:
        yield place, old, new


def short_value(value: Any) -> str:
    """A value of a setting for a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
