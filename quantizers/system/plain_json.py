"""Numbers that JSON has: it knows no NaN and no infinity, and a reader other than Python's refuses them."""

from __future__ import annotations

import math
from typing import Any


def finite(data: Any) -> Any:
    """The same with null for every number that is not finite; tuples become lists."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
