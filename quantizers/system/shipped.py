"""Where the files that travel with the program lie: recipes, calibration sets, the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent


def shipped(folder: str) -> Path:
    """The folder `recipes`, `calibration` or `models` of the installed wheel, or of the clone.

    A wheel carries them inside the package (pyproject.toml, force-include); in a clone or an
    editable install they lie beside it.
    """
    inside = _PACKAGE / "shipped" / folder
    return inside if inside.is_dir() else _PACKAGE.parent / folder


def find(name: str, folder: str, beside: Path | None = None, suffix: str = ".yaml") -> Path:
    """Resolve a path as the contract says: relative to `beside`, or a bare name among the shipped.

    Args:
        name: what the user or a recipe wrote; may lack the suffix when it is a bare name.
        folder: where bare names are looked up.
        beside: the folder that relative paths start from; the working directory when None.
        suffix: added to a bare name that has none.

    Returns:
        A path, which need not exist: the caller knows the better error message.
    """
    path = Path(os.path.expanduser(name))
    candidate = path if path.is_absolute() or beside is None else beside / path
    if os.path.exists(candidate) or len(path.parts) > 1:
        return candidate
    known = shipped(folder) / (name if name.endswith(suffix) else name + suffix)
    return known if os.path.exists(known) else candidate
