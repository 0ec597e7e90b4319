"""Expert batches and token chunks: how many experts are solved together, and how many tokens go through a layer.

torch does not promise the same bits for a matmul of another shape. So both sizes follow from the kind of device and
the layer's shape alone, and the experts of a batch from the routing: the output depends neither on free memory nor on
the number of processes.

    GPU    the largest power of two up to 16 whose arrays, 6 square float32 matrices for each expert, stay under 6 GiB
    CPU    up to 8 experts, as many as have their weights in 6 MiB of float32, so that they stay in its cache

Legend: E experts, U experts of a batch, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from quantizers.architectures.architecture import Architecture

Item = TypeVar("Item")
LARGEST_BATCH = 16
BATCH_BYTES = 6 * 2**30
SQUARES = 6
CPU_EXPERTS, CPU_CACHE_BYTES = 8, 6 * 2**20
FLOAT = 4
GPU_TOKENS, CPU_TOKENS = 16384, 4096  # of a chunk; a GPU would wait for the launches of smaller kernels
ROUTED_ROWS = 4096  # of a chunk's tokens that are routed to an expert, so many are gathered at a time
ALIGNED = 16  # they are padded to a multiple of it, as a GPU's matrix products need


def experts_per_batch(accelerator: bool, hidden: int, width: int) -> int:
    """U, the number of experts that are solved together, at least 1; `hidden` and `width` are H and I."""
    if not accelerator:
        return min(CPU_EXPERTS, max(1, CPU_CACHE_BYTES // (3 * FLOAT * hidden * width)))
    size = LARGEST_BATCH
    while size > 1 and size * SQUARES * FLOAT * max(hidden, width) ** 2 >= BATCH_BYTES:
        size //= 2
    return size


def expert_batches(experts: int, size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) expert of every batch; the last batch may be smaller."""
    return [(first, min(first + size, experts)) for first in range(0, experts, size)]


def by_load(tokens: Sequence[int], size: int) -> list[int]:
    """The order in which experts with so many routed tokens (E,) are solved: those of a batch of U have about as many.

    Busy and idle batches take turns, and so do such pairs, since of several processes each solves consecutive batches.
    """
    falling = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
    batches = [falling[first:last] for first, last in expert_batches(len(tokens), size)]
    smaller = batches.pop() if len(batches[-1]) < size else []  # which comes last
    turns = _from_both_ends(batches)
    pairs = _from_both_ends([turns[first : first + 2] for first in range(0, len(turns), 2)])
    return [expert for pair in (*pairs, [smaller]) for experts in pair for expert in experts]


def _from_both_ends(items: list[Item]) -> list[Item]:
    """The first, the last, the second, the last but one, …; the list is emptied."""
    return [items.pop(-(number % 2)) for number in range(len(items))]


def tokens_per_chunk(accelerator: bool) -> int:
    """Tokens that go together through a layer and into the Hessians: sequences are cut and joined to this size."""
    return GPU_TOKENS if accelerator else CPU_TOKENS


def batch_sizes(accelerator: bool, facts: Architecture) -> dict[str, int]:
    """Both sizes, for the fingerprint of a run."""
    experts = experts_per_batch(accelerator, facts.expert_inputs, facts.expert_width)
    return {"experts": experts, "rows": tokens_per_chunk(accelerator)}
