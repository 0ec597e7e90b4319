"""What the branches do to the model's output: their KL against the probes, once all have left the last layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from eval.fidelity.scoring import log_probabilities
from quantizers.forward.layered_model import LayeredModel
from quantizers.system.errors import QuantizeError
from quantizers.team.team import ALONE, Team

from .branches import Branches

LOGIT_ROWS = 256  # positions whose logits are held at a time


def divergences(
    model: LayeredModel,
    states: Sequence[torch.Tensor],
    layout: Branches,
    branches: int,
    check: Callable[[], None] = lambda: None,
    team: Team = ALONE,
) -> list[dict[str, float]]:
    """Mean KL(source || branch) of each layer's branch in nats, see `Branches.parts`.

    Args:
        states: those that left the last layer, in the order of `layout`, with so many branches.
        check: called between steps; may raise to interrupt.
        team: the processes that share the probes.

    Raises:
        QuantizeError: logits are not finite.
    """
    head = model.head()
    own: list[list[dict[int, float]]] = []  # by branch, then by the number of its sequence
    for k in team.share(len(layout.probes)):
        numbers = [k, layout.number_of_half(k)] if k in layout.halved else [k]
        totals = [dict.fromkeys(numbers, 0.0) for _ in range(branches)]
        source = states[layout.place(0, k)]
        for start in range(0, len(source), LOGIT_ROWS):
            rows = slice(start, start + LOGIT_ROWS)
            expected = log_probabilities(model.final(source[rows]), head)
            for branch, total in enumerate(totals, 1):
                for number in numbers:
                    log = log_probabilities(model.final(states[layout.place(branch, number)][rows]), head)
                    total[number] += float((expected.exp() * (expected - log)).sum(dtype=torch.float64))
            check()
        own.append(totals)
    found: list[dict[int, float]] = [{} for _ in range(branches)]
    for totals in (totals for probes in team.collect(own) for totals in probes):
        for whole, total in zip(found, totals, strict=True):
            whole.update(total)
    if not all(math.isfinite(value) for total in found for value in total.values()):
        raise QuantizeError("the model's logits are not finite on the calibration texts; nothing can be compared")
    lengths = dict(enumerate(layout.probe_lengths))
    lengths |= {layout.number_of_half(k): lengths[k] for k in layout.halved}
    return [layout.parts(total, lengths) for total in found]
