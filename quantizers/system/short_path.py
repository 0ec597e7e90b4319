"""A path as a user would type it."""

from __future__ import annotations

import os
from pathlib import Path


def short_path(path: str | Path) -> str:
    """The path relative to the current folder where that is shorter; what is not an absolute path stays as it is."""
    given = str(path)
    if not os.path.isabs(given):
        return given
    relative = os.path.relpath(given)
    return relative if len(relative) < len(given) else given
