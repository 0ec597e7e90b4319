"""Logits and log-probabilities in float32, independent of the forward pass's dtype.

Rounded to bfloat16, logits around 40 are off by up to 1/8, and a KL of 0.0002 reads 0.001. So the matrix product
itself must produce float32. On a GPU it does so from bfloat16 operands; elsewhere the operands are converted to
float32, the head block by block, so that no full float32 copy of it exists.

Legend: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from quantizers.solve.symmetric import gram

HEAD_ROWS = 16384  # rows of the head (vocabulary entries) that are multiplied at a time


def logits(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """states · headᵀ, (T, V) float32, from (T, H) and (V, H) of the same dtype."""
    if head.dtype == torch.float32:
        return gram(states.mT, head.mT)
    product = torch.empty(len(states), len(head), dtype=torch.float32, device=head.device)
    for start in range(0, len(head), HEAD_ROWS):
        product[:, start : start + HEAD_ROWS] = gram(states.mT, head[start : start + HEAD_ROWS].mT)
    return product


def log_probabilities(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """log p of every token at every position, (T, V) float32.

    Args:
        states: (T, H), after the final norm.
        head: (V, H).
    """
    return torch.log_softmax(logits(states, head), dim=-1)
