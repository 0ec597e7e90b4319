"""A sum whose order is written down, so that every device and every kernel gives the same bits."""

from __future__ import annotations

import torch

LANES = 8  # terms that are added side by side


def sum_in_order(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension but one: in 8 lanes, each from left to right, then neighbouring lanes in pairs.

    Args:
        terms: (…, g, R) float32; with g not divisible by 8 there are 4, 2 or 1 lanes. Overwritten.

    Returns:
        (…, R).
    """
    count = terms.shape[-2]
    lanes = min(LANES, count & -count)
    by_lane = terms.view(*terms.shape[:-2], -1, lanes, terms.shape[-1])
    total = by_lane[..., 0, :, :]
    for more in by_lane.unbind(-3)[1:]:
        total += more
    while total.shape[-2] > 2:
        even = total[..., ::2, :]
        even += total[..., 1::2, :]
        total = even
    return total.sum(-2)  # of two at most, which has only one order
