"""Data that every JSON reader accepts: JSON has no NaN and no infinity, and only Python reads and writes them."""

from __future__ import annotations

import math
from typing import Any


def finite(data: Any) -> Any:
    """The same data with None in place of every NaN or infinity; tuples become lists."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
