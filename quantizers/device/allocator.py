"""Memory that is freed goes back to the system, and not too eagerly: glibc's allocator, told so.

Left alone it keeps freed blocks of up to 32 MB for later, in an arena of its own for every thread that
ever ran. Between blocks that live on they fall to pieces, so that the peak of a layer crept up by a sixth
over 24 layers, and by no rule. With one arena, blocks from 4 MiB mapped on their own, and the rest
swept up before each chunk of experts, it stays where it is, within a few hundredths. Smaller blocks stay
in the heap until then: a block that is mapped anew costs a page fault for every 4 KiB, which took a
fifth of the tiny model's time.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # of malloc.h, M_ before each name
LARGE = 4 * 2**20
KEPT = 64 * 2**20


def settle() -> None:
    """From here on one arena, blocks of 4 MiB and more given back when they are freed. Nothing without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(ARENA_MAX, 1)
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, KEPT)


def give_back() -> None:
    """Give back what lies free between small blocks. Nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)
