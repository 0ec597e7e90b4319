"""The version, in the one place that has it: pyproject.toml and `quantizers.__version__` read it from here."""

import hashlib
from functools import cache
from pathlib import Path

__version__ = "0.1.0.dev0"


@cache
def files_digest() -> str:
    """SHA-256 of the files of the program's packages with their names, the first 12 digits: it tells two commits apart.

    Recipes, calibration sets and models that are shipped count for nothing: a report names those that it used.
    """
    root, found = Path(__file__).resolve().parents[2], hashlib.sha256()
    for package in ("eval", "quantizers", "stitch"):
        for file in sorted(path for path in (root / package).rglob("*") if path.is_file()):
            name = file.relative_to(root).as_posix()
            if "/__pycache__/" not in name and not name.startswith("quantizers/shipped/"):
                found.update(f"{name}\0".encode() + file.read_bytes())
    return found.hexdigest()[:12]
