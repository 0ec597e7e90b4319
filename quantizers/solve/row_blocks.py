"""Parts of a batch of matrices on which a CPU does all passes before it goes on to the next part.

A pass over a whole matrix of real width reads and writes main memory, and its temporaries are mapped and unmapped, with
a page fault for every 4 KiB. A part stays in the cache, and its temporaries in the heap.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantizers.device.kind import accelerated

PART = 2**18  # numbers: 1 MiB of float32


def row_blocks(weight: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Experts and rows of each part of (E, R, C): rows of one expert, or whole experts if several fit.

    Which rows belong together follows from R and C alone, not from E. On an accelerator everything is one part.
    """
    experts, rows, columns = weight.shape
    if accelerated(weight.device):
        yield slice(0, experts), slice(0, rows)
        return
    height = min(rows, max(1, PART // columns))
    together = max(1, PART // (rows * columns)) if height == rows else 1
    for expert in range(0, experts, together):
        for row in range(0, rows, height):
            yield slice(expert, min(expert + together, experts)), slice(row, min(row + height, rows))
