"""Sizes of memory as people write them: `96GiB`, `24 GB`, `1.5TiB`."""

from __future__ import annotations

import math
import re

from .errors import InputError

_FACTORS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "b": 1}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def parse_bytes(text: str, what: str) -> int:
    """Bytes of `96GiB` (powers of 1024) or `96GB` (powers of 1000), in upper or lower case.

    Stricter than pydantic.ByteSize, which would read `1,000GiB` as 1 byte, `120` as 120 bytes and `8gbit` as bits.

    Args:
        what: the option or key, for the message.

    Raises:
        InputError: not a size, less than one byte, or more than a float can hold.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    size = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= size < math.inf:
        raise InputError(f"{what}: {text!r} is not a size; write it as 96GiB or 96GB")
    return int(size)


def gib(number: float) -> str:
    """Bytes in GiB with one decimal, such as `61.4 GiB`; in MiB below 128 MiB."""
    return f"{number / 2**30:.1f} GiB" if abs(number) >= 2**27 else f"{number / 2**20:,.1f} MiB"
