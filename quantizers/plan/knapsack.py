"""The multiple-choice knapsack: one option for each layer, smallest total loss, total cost within a limit. Exact.

Dynamic programming over the layers keeps the Pareto frontier: those partial choices for the layers so far that
no other partial choice beats in both cost and loss. Two kinds of partial choices are pruned: those that cannot
be completed within the limit, and those whose lower bound exceeds the loss of a complete choice that is already
known. The lower bound comes from the Lagrangian relaxation: the limit is replaced with a price per unit of cost,
and each layer is minimized by itself. The price is the one that gives the highest bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

HALVINGS = 100  # steps of the bisection for the price

Table = Sequence[Sequence[float]]


def choose(costs: Sequence[Sequence[int]], losses: Table, limit: int) -> list[int] | None:
    """The best option of each layer.

    Args:
        costs: for each layer the cost of each option, integers >= 0.
        losses: for each layer the loss of each option, finite, >= 0.
        limit: bound on the sum of the chosen costs.

    Returns:
        The index of an option for each layer, with the smallest sum of losses, and of those the smallest cost.
        None if even the cheapest options exceed the limit.
    """
    price, known = _price(costs, losses, limit)
    if known is None:
        return None
    cost_of, loss_of = ([np.array(row, dtype=kind) for row in table] for table, kind in ((costs, int), (losses, float)))
    cheapest = [int(row.min()) for row in cost_of]
    relaxed = [float((loss + price * cost).min()) for cost, loss in zip(cost_of, loss_of, strict=True)]
    slack = 1e-9 * (known + price * limit)  # so that rounding errors never prune the optimum
    spent, lost = np.zeros(1, dtype=int), np.zeros(1)
    steps: list[
        tuple[NDArray[np.int_], NDArray[np.int_]]
    ] = []  # per partial choice: its parent's index, and the option taken
    for layer, (cost, loss) in enumerate(zip(cost_of, loss_of, strict=True)):
        cost_so_far, loss_so_far = (spent[:, None] + cost).ravel(), (lost[:, None] + loss).ravel()
        fits = cost_so_far + sum(cheapest[layer + 1 :]) <= limit
        bound = loss_so_far + price * (cost_so_far - limit) + sum(relaxed[layer + 1 :])
        fits &= bound <= known + slack
        order = np.flatnonzero(fits)
        order = order[np.lexsort((loss_so_far[order], cost_so_far[order]))]
        least = np.minimum.accumulate(loss_so_far[order])
        order = order[np.concatenate(([True], loss_so_far[order][1:] < least[:-1]))]
        spent, lost = cost_so_far[order], loss_so_far[order]
        steps.append((order // len(cost), order % len(cost)))
    chosen, at = [], len(spent) - 1  # the frontier is sorted by rising cost, so the last has the smallest loss
    for parents, options in reversed(steps):
        chosen.append(int(options[at]))
        at = int(parents[at])
    return chosen[::-1]


def _price(costs: Sequence[Sequence[int]], losses: Table, limit: int) -> tuple[float, float | None]:
    """The Lagrangian price, and the smallest loss of a complete choice that was found on the way.

    At this loss per unit of cost, the layers' separate minima just stay within the limit. The loss is None if even
    the cheapest options exceed the limit.
    """

    def totals(price: float) -> tuple[int, float]:
        picked = [
            min((lost + price * cost, cost, i) for i, (lost, cost) in enumerate(zip(loss, row, strict=True)))[2]
            for row, loss in zip(costs, losses, strict=True)
        ]
        pairs = list(zip(picked, costs, losses, strict=True))
        return sum(row[i] for i, row, _ in pairs), sum(float(loss[i]) for i, _, loss in pairs)

    if sum(min(row) for row in costs) > limit:
        return 0.0, None
    spent, lost = totals(0.0)
    if spent <= limit:
        return 0.0, lost
    # Costs are integers, so at the price `high` the cheapest option wins.
    low, high = 0.0, 1.0 + sum(max(loss) for loss in losses)
    known = totals(high)[1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        spent, lost = totals(middle)
        if spent <= limit:
            high, known = middle, min(known, lost)
        else:
            low = middle
    return high, known
