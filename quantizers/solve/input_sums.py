"""The sums of what w1 and w3 read, from sweeps over the rows: sequences outside, experts inside.

Legend: T rows of a block, H hidden, c experts of a unit, m rows routed to an expert (padded); x (T, H) is the input.

Sums are float32 and added block by block, in order, one block a matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantizers.forward.recorded import Recorded

from .symmetric import add_gram, mirror
from .token_weights import Blend, Survey, rows_of

Unit = tuple[int, int]  # first and last (exclusive) of its experts, in the order in which they are solved


@dataclass(frozen=True)
class InputSums:
    """Sums of x over all usable rows, float32.

    Attributes:
        gram: Σ x xᵀ (H, H).
        mean: mean |x| (H,).
    """

    gram: torch.Tensor
    mean: torch.Tensor


def sweep(
    blocks: Sequence[Recorded], found: Survey, units: Sequence[Unit], hidden: int, *, with_all: bool
) -> tuple[InputSums | None, dict[Unit, torch.Tensor]]:
    """Read all blocks once.

    Args:
        found: see `token_weights.survey`.
        units: those whose sums are wanted; they all are in memory at a time.
        hidden: H.
        with_all: whether the sums over all rows are wanted as well.

    Returns:
        The sums over all rows; and of each unit Σ r² x xᵀ (c, H, H) over the rows routed to its experts.
    """
    device = found.blended.share.device
    total, size = torch.zeros(hidden, hidden, device=device), torch.zeros(hidden, device=device)
    routed = {unit: torch.zeros(unit[1] - unit[0], hidden, hidden, device=device) for unit in units}
    for block, table in zip(blocks, found.tables, strict=True):
        if with_all:
            add_gram(total, block.x, block.x)
            size += torch.linalg.vector_norm(block.x, 1, dim=0, dtype=torch.float32)
        for unit, gram in routed.items():
            for rows, weight in table.routed(*unit):
                _add_routed(gram, block.x, rows, weight)
    for gram in routed.values():
        mirror(gram)
    return InputSums(mirror(total), size / max(found.blended.tokens, 1)) if with_all else None, routed


def _add_routed(total: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Add Σ r² x xᵀ (c, H, H) over the rows (c, m) of a block that are routed to a unit's experts."""
    picked = rows_of(x, rows).mul_(weight.unsqueeze(-1).to(x.dtype))  # (c, m, H)
    add_gram(total, picked, picked)


def blended_gram(routed: torch.Tensor, all_gram: torch.Tensor, blended: Blend, unit: Unit) -> torch.Tensor:
    """Blended Σ x xᵀ (c, H, H) of a unit, each of total weight 1, in the memory of `routed`.

    Args:
        routed: of the unit, see `sweep`.
        all_gram: (H, H), see `InputSums`.
    """
    of_routed, of_all = blended.factors(*unit)
    return routed.mul_(of_routed[:, None, None]).addcmul_(all_gram, of_all[:, None, None])
