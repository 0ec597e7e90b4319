"""A model's last matrix: logits and log-probabilities in float32, whatever dtype the forward pass has.

Rounded to bfloat16, logits around 40 are off by up to 1/8, and a KL of 0.0002 reads 0.001. So the product itself has
to come out in float32. On a GPU it does, from operands of bfloat16; elsewhere the operands are made float32, the
head's in parts, so that no such copy of all of it exists.

Legend: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch

from .symmetric import gram

WORDS = 16384  # rows of the head that are in float32 at a time


def logits(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """states headᵀ (T, V) in float32, from (T, H) and (V, H) of one dtype."""
    if head.dtype == torch.float32 or head.is_cuda:
        return gram(states.mT, head.mT)
    return torch.cat([gram(states.mT, words.mT) for words in torch.split(head, WORDS)], dim=1)


def log_probabilities(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """log p of every word at every position, (T, V) float32, of states (T, H) after the final norm and head (V, H)."""
    return torch.log_softmax(logits(states, head), dim=-1)
