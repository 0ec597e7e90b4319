"""A model's last matrix: logits and log-probabilities in float32, whatever dtype the forward pass has.

Rounded to bfloat16, logits around 40 are off by up to 1/8, and a KL of 0.0002 reads 0.001. So the product itself has
to come out in float32. On a GPU it does, from operands of bfloat16; elsewhere the operands are made float32, the
head's in parts, so that no such copy of all of it exists.

Legend: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from quantizers.solve.symmetric import gram

WORDS = 16384  # rows of the head, a block of the vocabulary, that are multiplied at a time


def logits(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """states headᵀ (T, V) in float32, from (T, H) and (V, H) of one dtype."""
    if head.dtype == torch.float32:
        return gram(states.mT, head.mT)
    found = torch.empty(len(states), len(head), dtype=torch.float32, device=head.device)
    for start in range(0, len(head), WORDS):
        found[:, start : start + WORDS] = gram(states.mT, head[start : start + WORDS].mT)
    return found


def log_probabilities(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """log p of every word at every position, (T, V) float32, of states (T, H) after the final norm and head (V, H)."""
    return torch.log_softmax(logits(states, head), dim=-1)
