"""Compares a candidate with its source after a layer: how far its hidden states are, and whether its router agrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from quantizers.forward.lane import Lane

from .figures import Text, parts

Pair = tuple[torch.Tensor, torch.Tensor]  # of one text: the source's rows, the candidate's


def compare(source: Lane, candidate: Lane, texts: Sequence[Text], *, routed: bool = True) -> dict[str, Any]:
    """Figures of the layer that both lanes have just passed through.

    Args:
        routed: whether the layer has experts.

    Returns:
        agreement: the share of the source's expert choices that the candidate makes too, None without experts;
        hidden_error:
        ‖h_candidate − h_source‖ / ‖h_source‖ of the states that leave the layer; and `long` with the same of the long
        texts, if they are reported separately (see `figures.parts`).
    """
    compared = [
        {
            "agreement": _agreement([(source.chosen[i], candidate.chosen[i]) for i in part]) if routed else None,
            "hidden_error": _relative_error([(source.left[i], candidate.left[i]) for i in part]),
        }
        for part in parts(texts)
        if part
    ]
    return compared[0] | ({"long": compared[1]} if len(compared) > 1 else {})


def _agreement(pairs: Sequence[Pair]) -> float:
    same = sum((a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).sum() for a, b in pairs)
    return int(same) / sum(a.numel() for a, _ in pairs)


def _relative_error(pairs: Sequence[Pair]) -> float:
    difference = sum((a.float() - b.float()).double().square().sum() for a, b in pairs)
    return math.sqrt(float(difference) / float(sum(a.double().square().sum() for a, _ in pairs)))
