"""How many tokens a router is taken to send to each expert of a layer that is counted.

Routers send some experts several times as many tokens as others, and text of one kind to others than text of another
kind. What is routed to the experts of a unit is padded to the busiest of them, so this costs time, and a count that
knew only average experts would leave it out.

Taken are shares whose logarithms are normally distributed, once for the whole layer and once more for each block of
rows. With SPREAD the busiest of 256 experts gets 6 times the average in the whole layer, and the least an eighth.
That is assumed, not measured; the seed is fixed, so the same layer is counted the same.

Legend: E experts, B blocks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from quantizers.plan.units import by_load, rows_of_block, units_of

SPREAD = 0.6  # standard deviation of the logarithms; half of it for a block
SEED = 0
TAKEN = (
    "routing: taken to be uneven, so that of 256 experts the busiest gets 6 times the average, and the least an eighth"
)


def routed_rows(sizes: Mapping[str, int], tokens: int, spread: float = SPREAD) -> torch.Tensor:
    """Rows of each block that the router sends to each expert, and all rows of the block, (B, E + 1) int64.

    Args:
        sizes: with `experts`, and `chosen` of each token.
        spread: 0 for a router that sends all experts the same.
    """
    experts, step = sizes["experts"], rows_of_block(True)
    rows = torch.tensor([min(step, tokens - first) for first in range(0, tokens, step)])
    generator = torch.Generator().manual_seed(SEED)
    always = torch.randn(experts, generator=generator, dtype=torch.float64) * spread
    here = torch.randn(len(rows), experts, generator=generator, dtype=torch.float64) * spread / 2
    share = (always + here).softmax(1)
    routed = (share * sizes["chosen"] * rows[:, None]).ceil().long().minimum(rows[:, None])
    return torch.cat([routed, rows[:, None]], 1)


def of_units(routed: torch.Tensor, unit: int) -> list[int]:
    """Rows of each unit's experts, in the order in which units are solved.

    Args:
        routed: see `routed_rows`.
        unit: experts of a unit.
    """
    rows: list[int] = routed[:, :-1].sum(0).tolist()
    order = by_load(rows, unit)
    return [sum(rows[expert] for expert in order[first:last]) for first, last in units_of(len(rows), unit)]


def answer(routed: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """Answers the look at a layer's routing, see `solve.token_weights.survey`."""
    blocks, experts = routed.shape[0], routed.shape[1] - 1
    both = torch.cat([routed[:, :experts], routed], 1)
    return lambda asked: both if asked.shape == (blocks, 2 * experts + 1) else None
