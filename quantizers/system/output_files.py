"""Names of the files that a run adds to the checkpoint."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

REPORT = "report.json"
CARD = "README.md"
PAGE = "report.html"
SERVE_CHECK = "serve-check.json"  # of `quantize serve-check`; not of the run, so not in report.json's list
RECIPE = "recipe.yaml"
CALIBRATION = "calibration.yaml"
HELD_OUT = "held-out.yaml"
LOCK = ".lock.json"
FACTS = "facts.yaml"  # the user's own architecture spec, or a derived one
CALIBRATION_PICTURE, COVERAGE_PICTURE = "calibration.png", "coverage.png"
DATA = re.compile(r"data-([0-9a-f]{16})\.\w+")  # a set's local data file, named by the first 16 digits of its SHA-256
SETS = (CALIBRATION, f"calibration{LOCK}", HELD_OUT, f"held-out{LOCK}")
OWN = (REPORT, CARD, PAGE, SERVE_CHECK, RECIPE, FACTS, *SETS, CALIBRATION_PICTURE, COVERAGE_PICTURE)


def is_own(name: str) -> bool:
    """Whether a run, or a check of its output, adds a file with this name; the source's files have other names."""
    return name in OWN or DATA.fullmatch(name) is not None


def is_within(name: object) -> bool:
    """Whether a name in a report is that of a file in the report's folder or below, so that it points to no other."""
    if not isinstance(name, str) or not name:
        return False
    path = PurePosixPath(name)
    return str(path) == name and not {"/", ".", ".."} & set(path.parts)


def files_below(folder: Path) -> list[str]:
    """The names of all files in a folder and its subfolders, without hidden ones, with / between the parts."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.startswith(".") and "/." not in name)
