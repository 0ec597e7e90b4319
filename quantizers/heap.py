"""Memory that is freed goes back to the system: glibc's allocator, told so.

Left alone it keeps freed blocks of up to 32 MB for later, in an arena of its own for every thread that
ever ran. Between blocks that live on they fall to pieces, so that the peak of a layer crept up by a sixth
over 24 layers, and by no rule. With one arena, blocks from 1 MiB mapped on their own, and the rest
swept up after each layer, it stays where it is.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h; setting the first also fixes it
LARGE = 2**20


def settle() -> None:
    """From here on one arena, and blocks of 1 MiB and more given back when they are freed. Nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(ARENA_MAX, 1)
        mallopt(MMAP_THRESHOLD, LARGE)


def give_back() -> None:
    """Give back what lies free between small blocks. Nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
