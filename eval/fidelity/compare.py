"""Compares a candidate with its source after a layer: how far its hidden states are, and whether its router agrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantizers.forward.lane import Lane
from quantizers.team.team import ALONE, Team

from .figures import Text, parts


@dataclass(frozen=True)
class OfText:
    """How one text compares.

    Attributes:
        same, choices: expert choices that the candidate makes too, and all that the source makes; 0 without experts.
        difference, size: ‖h_candidate − h_source‖² and ‖h_source‖² of the states that leave the layer.
    """

    same: int
    choices: int
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
    own = {i: _of_text(source, candidate, i, routed) for i in source.left.share.owned}
    all_of_them = {i: one for part in team.collect(own) for i, one in part.items()}
    compared = [_together([all_of_them[i] for i in part], routed) for part in parts(texts) if part]
    return compared[0] | ({"long": compared[1]} if len(compared) > 1 else {})


def _of_text(source: Lane, candidate: Lane, number: int, routed: bool) -> OfText:
    a, b = source.left.of(number), candidate.left.of(number)
    difference = float((a.float() - b.float()).double().square().sum())
    size = float(a.double().square().sum())
    if not routed:
        return OfText(0, 0, difference, size)
    ours, theirs = source.chosen.of(number), candidate.chosen.of(number)
    same = (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).sum()
    return OfText(int(same), ours.numel(), difference, size)


def _together(texts: Sequence[OfText], routed: bool) -> dict[str, Any]:
    difference = size = 0.0
    for one in texts:  # added in their order, without the correction that sum() makes since Python 3.12
        difference += one.difference
        size += one.size
    agreement = sum(one.same for one in texts) / sum(one.choices for one in texts) if routed else None
    return {"agreement": agreement, "hidden_error": math.sqrt(difference / size)}
