"""The fixed units of work: how many experts are solved together, and how many rows go together.

torch does not promise the same bits for a matmul of another shape. So whatever reaches the output is computed in
units whose size follows from the kind of device and the layer's shape, and whose experts from the routing. Free memory
decides how many units are held at a time, the number of processes who solves which of them: both decide speed, never a
byte.

    accelerator  the largest power of two up to 16 whose arrays, 6 square matrices of float32 for each expert, stay
                 under 6 GiB: large batches fill it, and a larger card gains nothing by still larger ones
    CPU          up to 8 experts, as many as have their weights in 6 MiB of float32: they are to stay in its cache

A block of rows goes through router and experts together, and into the sums together; so does a batch of sequences
through attention (forward/attention_batches.py). A GPU gets large ones: it would else wait for the launches of small
kernels.

Legend: E experts, U experts of a unit, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")
LARGEST_UNIT, UNIT_BYTES, SQUARES = 16, 6 * 2**30, 6
CPU_EXPERTS, CPU_CACHE_BYTES = 8, 6 * 2**20
FLOAT = 4
ACCELERATOR_ROWS, CPU_ROWS = 16384, 4096
ROUTED_ROWS = 4096  # of a block's rows that are routed to an expert, so many are gathered at a time
ALIGNED = 16  # they are padded to a multiple of so many, since a GPU's products are slow where lines begin anywhere


def unit_of_experts(accelerator: bool, hidden: int, width: int) -> int:
    """U, how many experts are solved together, at least 1.

    Args:
        accelerator: see `kind.accelerated`.
        hidden, width: H and I, the sizes of an expert's matrices.
    """
    if not accelerator:
        return min(CPU_EXPERTS, max(1, CPU_CACHE_BYTES // (3 * FLOAT * hidden * width)))
    unit = LARGEST_UNIT
    while unit > 1 and unit * SQUARES * FLOAT * max(hidden, width) ** 2 >= UNIT_BYTES:
        unit //= 2
    return unit


def units_of(experts: int, unit: int) -> list[tuple[int, int]]:
    """First and last (exclusive) expert of every unit; the last one may have fewer."""
    return [(first, min(first + unit, experts)) for first in range(0, experts, unit)]


def by_load(tokens: Sequence[int], unit: int) -> list[int]:
    """The order in which experts are solved, so that those of a unit have about as many routed tokens.

    Busy units and idle ones take turns, and so do such pairs, since of several processes each solves consecutive units.
    (Where each solves one, nothing balances them.) The order follows from the routing alone, and is the same for any
    free memory and number of processes.

    Args:
        tokens: routed to each expert, (E,).
        unit: U.
    """
    falling = sorted(range(len(tokens)), key=lambda expert: -tokens[expert])
    units = [falling[first:last] for first, last in units_of(len(tokens), unit)]
    smaller = units.pop() if len(units[-1]) < unit else []  # which comes last
    turns = _from_both_ends(units)
    pairs = _from_both_ends([turns[first : first + 2] for first in range(0, len(turns), 2)])
    return [expert for pair in (*pairs, [smaller]) for experts in pair for expert in experts]


def _from_both_ends(items: list[Item]) -> list[Item]:
    """The first, the last, the second, the last but one, …; the list is emptied."""
    return [items.pop(-(number % 2)) for number in range(len(items))]


def rows_of_block(accelerator: bool) -> int:
    """Rows that go together, whatever sequences they belong to: a long one is cut, short ones are joined."""
    return ACCELERATOR_ROWS if accelerator else CPU_ROWS


def work_units(accelerator: bool, sizes: Mapping[str, int]) -> dict[str, int]:
    """Both, for the fingerprint of a run."""
    return {
        "experts": unit_of_experts(accelerator, sizes["hidden"], sizes["width"]),
        "rows": rows_of_block(accelerator),
    }
