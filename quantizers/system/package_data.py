"""Files shipped with the program: recipes, calibration sets, the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def shipped(folder: str) -> Path:
    """The folder `recipes`, `calibration` or `models` of the installed wheel, or of the clone.

    A wheel contains them inside the package (pyproject.toml, force-include); in a clone or an
    editable install they are next to the package.
    """
    inside = _PACKAGE / "shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def shipped_names(folder: str) -> list[str]:
    """The names of the YAML files in a shipped folder, without suffix, sorted."""
    return sorted(path.stem for path in shipped(folder).glob("*.yaml"))


def find(name: str, folder: str, beside: Path | None = None) -> Path:
    """Find a file by its path, or by the bare name of a file in a shipped folder, which may omit the suffix.

    Args:
        beside: the folder that relative paths start from; None for the working directory.

    Returns:
        A path. It need not exist: the caller can give a better error message.
    """
    path = Path(os.path.expanduser(name))
    candidate = path if path.is_absolute() or beside is None else beside / path
    if os.path.exists(candidate) or len(path.parts) > 1:
        return candidate
    known = shipped(folder) / f"{name.removesuffix('.yaml')}.yaml"
    return known if os.path.exists(known) else candidate
