"""The version, in the one place that has it: pyproject.toml and `quantizers.__version__` read it from here."""

import hashlib
import os
from functools import cache
from pathlib import Path

__version__ = "0.1.0.dev0"


@cache
def files_digest() -> str:
    """SHA-256 of the files of the program's packages with their names, the first 12 digits: it tells two commits apart.

    Recipes, calibration sets and models that are shipped count for nothing: a report names those that it used.
    """
    package, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    # In a clone `eval` and `stitch` are links to the folders beside the package.
    files = (Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
    for name, file in sorted((file.relative_to(package).as_posix(), file) for file in files):
        if "__pycache__/" not in name and not name.startswith("shipped/"):
            digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
