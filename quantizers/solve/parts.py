"""Parts of a batch of matrices on which a CPU does all passes before it goes on to the next part.

A pass over a whole matrix of real width reads and writes main memory, and its temporaries are mapped and unmapped, with
a page fault for every 4 KiB. A part stays in the cache, and its temporaries in the heap.

Matrices lie transposed, (E, C, R), so that a column is in one piece: whatever is the same for a column or for a group's
rows is then broadcast along long rows, and not 32 numbers at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantizers.device.devices import is_accelerator

PART = 2**19  # numbers: 2 MiB of float32


def column_parts(columns_first: torch.Tensor, group: int) -> Iterator[tuple[slice, slice]]:
    """Experts and columns of each part of (E, C, R): whole groups of columns of one expert, or whole experts.

    Which columns belong together follows from C, R and the group alone, not from E. On an accelerator everything is
    one part.
    """
    experts, columns, rows = columns_first.shape
    if is_accelerator(columns_first.device):
        yield slice(0, experts), slice(0, columns)
        return
    width = min(columns, max(1, PART // (group * rows)) * group)
    together = max(1, PART // (rows * columns)) if width == columns else 1
    for expert in range(0, experts, together):
        for column in range(0, columns, width):
            yield slice(expert, min(expert + together, experts)), slice(column, min(column + width, columns))


def in_groups(part: torch.Tensor, group: int) -> torch.Tensor:
    """View (e, C, R) as (e, n, g, R)."""
    return part.view(part.shape[0], -1, group, part.shape[2])
