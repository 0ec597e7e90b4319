"""Compares a candidate with its source after a layer: how far its hidden states are, and whether its router agrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantizers.device.fetch import fetched
from quantizers.forward.batches import padded
from quantizers.forward.lane import Lane
from quantizers.team.team import ALONE, Team

from .figures import Text, parts


@dataclass(frozen=True)
class OfText:
    """How one text compares.

    Attributes:
        same: expert choices of the source that the candidate makes too; 0 without experts.
        difference, size: ‖h_candidate − h_source‖² and ‖h_source‖² of the states that leave the layer.
    """

    same: float
    difference: float
    size: float


def compare(
    source: Lane, candidate: Lane, texts: Sequence[Text], *, routed: bool = True, team: Team = ALONE
) -> dict[str, Any]:
    """Figures of the layer that both lanes have just passed through.

    Args:
        routed: whether the layer has experts.
        team: the processes that share the texts; each compares its own.

    Returns:
        agreement: the share of the source's expert choices that the candidate makes too, None without experts;
        hidden_error:
        ‖h_candidate − h_source‖ / ‖h_source‖ of the states that leave the layer; and `long` with the same of the long
        texts, if they are reported separately (see `figures.parts`).
    """
    found = fetched({str(b.start): _of_batch(source, candidate, b, routed) for b in source.left.share.owned_batches})
    own = {int(first) + i: OfText(*row) for first, rows in found.items() for i, row in enumerate(rows.tolist())}
    all_of_them = {i: one for part in team.collect(own) for i, one in part.items()}

    def choices(part: Sequence[int]) -> int:
        return sum(source.chosen.share.lengths[i] for i in part) * source.chosen.width if routed else 0

    compared = [_together([all_of_them[i] for i in part], choices(part)) for part in parts(texts) if part]
    return compared[0] | ({"long": compared[1]} if len(compared) > 1 else {})


def _of_batch(source: Lane, candidate: Lane, batch: range, routed: bool) -> torch.Tensor:
    """The numbers of `OfText` of each text of a batch (B, 3) float64, on the lanes' device."""
    device = source.model.device
    rows, lengths = source.left.of_batch(batch)
    a, b = (lane.left.flat[rows].to(device) for lane in (source, candidate))
    same = torch.zeros(len(a), dtype=torch.float64, device=device)
    if routed:
        ours, theirs = (lane.chosen.flat[rows].to(device) for lane in (source, candidate))
        same += (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).sum(-1)
    difference = (a.float() - b.float()).double().square().sum(-1)
    of_rows = torch.stack([same, difference, a.double().square().sum(-1)], dim=-1)
    return padded(of_rows, lengths).sum(1)


def _together(texts: Sequence[OfText], choices: int) -> dict[str, Any]:
    difference = size = 0.0
    for one in texts:  # added in their order, without the correction that sum() makes since Python 3.12
        difference += one.difference
        size += one.size
    agreement = sum(one.same for one in texts) / choices if choices else None
    return {"agreement": agreement, "hidden_error": math.sqrt(difference / size)}
