"""Files shipped with the program: recipes, calibration sets, the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def shipped(folder: str) -> Path:
    """The folder `recipes`, `calibration` or `models`; in a clone quantizers/shipped has links to them."""
    return (_PACKAGE / "shipped" / folder).resolve()


def shipped_names(folder: str) -> list[str]:
    """The names of the YAML files in a shipped folder, without suffix, sorted."""
    return sorted(path.stem for path in shipped(folder).glob("*.yaml"))


def shipped_model(name: str) -> Path | None:
    """The folder of the model that comes with the program under this bare name, or None."""
    return next((folder for folder in sorted(shipped("models").iterdir()) if folder.name == name), None)


def find(name: str, folder: str, beside: Path | None = None) -> Path:
    """A file's path, from its path or the bare name of a file in a shipped folder, which may omit the suffix.

    It need not exist: the caller can give a better error message. `beside` is where relative paths start from, None
    for the working directory.
    """
    path = Path(os.path.expanduser(name))
    candidate = (beside or Path()) / path  # which is an absolute path itself
    if os.path.exists(candidate) or len(path.parts) > 1:
        return candidate
    known = shipped(folder) / f"{name.removesuffix('.yaml')}.yaml"
    return known if os.path.exists(known) else candidate
