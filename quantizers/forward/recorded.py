"""What the MoE block of one layer saw: its input, and where the router sent each token.

Legend: T tokens of one sequence, H hidden, E experts, K experts chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recorded:
    """One sequence as the MoE block of a layer saw it.

    Attributes:
        x: (T, H), the block's input.
        chosen: (T, K) int64, the experts the router chose.
        weight: (T, K) float32, their routing weights.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: how many tokens each expert was sent, from (T, K) choices."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )
