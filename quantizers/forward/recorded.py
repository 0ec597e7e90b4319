"""The recorded input of one layer's MoE block, and the experts to which the router sent each token.

Legend: T tokens of one sequence, H hidden, E experts, K experts chosen per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recorded:
    """The input and routing of one sequence at a layer's MoE block.

    Attributes:
        x: (T, H), the block's input.
        chosen: (T, K) int64, the experts that the router chose.
        weight: (T, K) float32, their routing weights.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: number of tokens routed to each expert, from the chosen experts (T, K)."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )
