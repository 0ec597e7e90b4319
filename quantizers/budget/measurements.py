"""What the pass before a run has measured, read again from its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "schemes"


TOLERANCE = 2.5  # ratio of KL per disturbance to that of the half: KL itself 1.6 to 10 times as large, ideally 4


def read_measurements(work: Path, layers: Sequence[int]) -> list[dict[str, Any]] | None:
    """The finished measurements, one entry for each of these layers; None while they are not complete.

    Args:
        layers: the numbers of all layers with experts.

    Each has `layer`, `seconds`, `kl` and `disturbance` of its branch, and by a scheme's name `error`, `by_matrix` (all
    three are squares, relative to the states) and `loss`. `growth` is KL per disturbance over that of the half: 1 where
    KL grows with the square, None where one of the two has no KL. `at_half` says whether the loss was taken from the
    half.
    """
    try:
        kl = json.loads((work / FOLDER / "kl.json").read_text())
        entries = [json.loads(entry_file(work, number).read_text()) for number in layers]
        return [_with_loss(entry, found) for entry, found in zip(entries, kl, strict=True)]
    except (OSError, ValueError, TypeError, KeyError):  # nothing there, or written by an older version
        return None


def measuring_seconds(work: Path, layers: int) -> float:
    """Seconds that the finished pass took in all layers, of which some may have no experts.

    Args:
        layers: the number of all layers.
    """
    return float(sum(json.loads(entry_file(work, number).read_text())["seconds"] for number in range(layers)))


def _with_loss(entry: dict[str, Any], kl: dict[str, float]) -> dict[str, Any]:
    """An entry completed from its branch's KL, which has the parts of `Branches.parts`."""
    errors: dict[str, float] = entry["error"]
    rate = _rate(kl["all"], entry["disturbance"])
    some, half = _rate(kl["some"], entry["halved"]["some"]), _rate(kl["half"], entry["halved"]["half"])
    growth = some / half if some and half else None
    at_half = growth is not None and not 1 / TOLERANCE <= growth <= TOLERANCE
    each = {name: (half if at_half else rate) * error for name, error in errors.items()}
    return entry | {"kl": kl["all"], "growth": growth, "at_half": at_half, "loss": each}


def _rate(kl: float, disturbance: float) -> float:
    # A layer that rounding does not change, for example one of zeros, loses nothing under any scheme.
    return max(kl, 0.0) / disturbance if disturbance > 0 else 0.0


def entry_file(work: Path, layer: int) -> Path:
    return work / FOLDER / f"{layer:05d}.json"
