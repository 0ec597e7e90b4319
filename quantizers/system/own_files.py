"""What a run writes of its own beside the checkpoint, by name, and the hash by which files are compared."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

REPORT, CARD, PAGE = "report.json", "README.md", "report.html"
RECIPE, CALIBRATION, HELD_OUT, LOCK = "recipe.yaml", "calibration.yaml", "held-out.yaml", ".lock.json"
CALIBRATION_PICTURE, COVERAGE_PICTURE = "calibration.png", "coverage.png"
DATA = re.compile(r"data-([0-9a-f]{16})\.\w+")  # a set's local data, by content: how its SHA-256 begins
SETS = (CALIBRATION, f"calibration{LOCK}", HELD_OUT, f"held-out{LOCK}")
OWN = (REPORT, CARD, PAGE, RECIPE, *SETS, CALIBRATION_PICTURE, COVERAGE_PICTURE)


def is_own(name: str) -> bool:
    """Whether a file of this name is one that a run adds, and none of the source's."""
    return name in OWN or DATA.fullmatch(name) is not None


def is_plain(name: object) -> bool:
    """Whether a name in a report is that of a file beside it, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal. Raises OSError where it cannot be read."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
