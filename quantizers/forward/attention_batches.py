"""Batches of sequences for attention: a short sequence alone would give it a handful of tokens.

A batch has consecutive sequences, padded at their end to the longest of them. Attention is causal, so no token sees
what comes after it, and padding needs no mask. What is computed together follows from the lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_PADDING = 1 / 4  # of the rows of a batch


def batches(lengths: Sequence[int], most: int) -> list[range]:
    """Consecutive sequences of at most `most` rows with their padding, or one longer sequence alone.

    Args:
        lengths: tokens of each sequence.
        most: rows of a batch of more than one sequence.
    """
    result: list[range] = []
    first = tokens = longest = 0
    for number, length in enumerate(lengths):
        tokens, longest = tokens + length, max(longest, length)
        rows = longest * (number + 1 - first)
        if number > first and (rows > most or rows - tokens > MOST_PADDING * rows):
            result.append(range(first, number))
            first, tokens, longest = number, length, length
    return [*result, range(first, len(lengths))] if lengths else []


def padded(rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """(B, T, …) from the rows (Σ T_i, …) of B sequences, with zeros at the end of those that are shorter than T.

    A view where all are of one length.
    """
    if len(set(lengths)) == 1:
        return rows.view(len(lengths), lengths[0], *rows.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(rows, list(lengths))), batch_first=True)


def unpadded(batch: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The rows (Σ T_i, …) again; a view where all are of one length."""
    if len(set(lengths)) == 1:
        return batch.flatten(0, 1)
    return torch.cat([sequence[:length] for sequence, length in zip(batch, lengths, strict=True)])
