"""The knapsack: one option for each layer, least loss in all, cost within a limit. Exact, and pure.

Layer by layer it keeps the frontier: of all choices for the layers so far, those that no other beats in
both cost and loss. Whatever follows, a beaten choice cannot become the best. Of the frontier, what could
not be completed within the limit is dropped, and what could not come below a complete choice that is
already known, however well it went on: the bound is Lagrange's, with the price at which the relaxed
problem is hardest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HALVINGS = 100  # of the interval that holds the price

Table = Sequence[Sequence[float]]


def choose(costs: Sequence[Sequence[int]], losses: Table, limit: int) -> list[int] | None:
    """The best option of each layer.

    Args:
        costs: for each layer the cost of each option, whole numbers, 0 or more.
        losses: likewise, finite, 0 or more.
        limit: of the sum of the chosen costs.

    Returns:
        An option's number for each layer: least sum of losses, of these least cost; None where even the
        cheapest options cost too much.
    """
    price, known = _price(costs, losses, limit)
    if known is None:
        return None
    cost_of, loss_of = ([np.array(row, dtype=kind) for row in table] for table, kind in ((costs, int), (losses, float)))
    cheapest = [int(row.min()) for row in cost_of]
    relaxed = [float((loss + price * cost).min()) for cost, loss in zip(cost_of, loss_of, strict=True)]
    slack = 1e-9 * (known + price * limit)  # rounding must not drop the best one itself
    spent, lost = np.zeros(1, dtype=int), np.zeros(1)
    steps: list[tuple[NDArray[np.int_], NDArray[np.int_]]] = []  # of each choice: which one it continues, and how
    for layer, (cost, loss) in enumerate(zip(cost_of, loss_of, strict=True)):
        total, harm = (spent[:, None] + cost).ravel(), (lost[:, None] + loss).ravel()
        fits = total + sum(cheapest[layer + 1 :]) <= limit
        bound = harm + price * (total - limit) + sum(relaxed[layer + 1 :])
        fits &= bound <= known + slack
        order = np.flatnonzero(fits)
        order = order[np.lexsort((harm[order], total[order]))]
        least = np.minimum.accumulate(harm[order])
        order = order[np.concatenate(([True], harm[order][1:] < least[:-1]))]
        spent, lost = total[order], harm[order]
        steps.append((order // len(cost), order % len(cost)))
    chosen, at = [], len(spent) - 1  # the frontier falls in loss as it rises in cost
    for parents, options in reversed(steps):
        chosen.append(int(options[at]))
        at = int(parents[at])
    return chosen[::-1]


def _price(costs: Sequence[Sequence[int]], losses: Table, limit: int) -> tuple[float, float | None]:
    """Loss per cost at which every layer for itself just keeps to the limit, and the loss of all then."""

    def at(price: float) -> tuple[int, float]:
        picked = [
            min((lost + price * cost, cost, i) for i, (lost, cost) in enumerate(zip(loss, row, strict=True)))[2]
            for row, loss in zip(costs, losses, strict=True)
        ]
        pairs = list(zip(picked, costs, losses, strict=True))
        return sum(row[i] for i, row, _ in pairs), sum(float(loss[i]) for i, _, loss in pairs)

    if sum(min(row) for row in costs) > limit:
        return 0.0, None
    spent, lost = at(0.0)
    if spent <= limit:
        return 0.0, lost
    low, high = 0.0, 1.0 + sum(max(loss) for loss in losses)  # costs are whole: at this price the cheapest wins
    known = at(high)[1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        spent, lost = at(middle)
        if spent <= limit:
            high, known = middle, min(known, lost)
        else:
            low = middle
    return high, known
