"""What a solved layer says of itself in the report: errors, and a line for every expert that fell back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.formats.packed_integers import grouped
from quantizers.recipe.schema import Experts

from .result import Leaning
from .rounding import DAMPING
from .routing_weights import Survey

SEARCHED = ("norm_search_before", "norm_search_after")

# In float64 on the CPU: `SolvedBatch.totals`, `damping.…`, `Blend`'s `routed_tokens` and `share`, and SEARCHED.
Numbers = Mapping[str, torch.Tensor]


def errors_of(numbers: Numbers, tokens: int) -> dict[str, float]:
    """Means and ratios over all experts, added in their order whatever units they were solved in."""
    errors = {name: float(numbers[name]) / max(tokens, 1) for name in SEARCHED if name in numbers}
    errors["expert_tokens"] = float(numbers["seen"].min())
    experts = len(numbers["seen"])
    sums = {key: float(value.sum()) for key, value in numbers.items() if not key.startswith("damping.")}
    errors |= {key: value / experts for key, value in sums.items() if key.startswith("down_search")}
    for name in ("gate_up", "down"):
        whole = sums[f"{name}_whole"]
        errors[f"{name}_rounding"] = math.sqrt(sums[f"{name}_lost"] / whole) if whole > 0 else 0.0
    return errors


def leaning(numbers: Numbers, full_share_at: int) -> Leaning:
    """How far the experts lean on tokens that were not routed to them; `full_share_at` as in `Blend`."""
    fewer = int((numbers["routed_tokens"] < full_share_at).sum())
    return Leaning(full_share_at, fewer, float(numbers["share"].min()))


def zero_groups(weight: torch.Tensor, group: int) -> torch.Tensor:
    """(c,) int64: how many groups of each matrix (c, R, C) are all zero: they have no scale, and are given 1."""
    return grouped(weight, group).any(-1).logical_not_().sum((1, 2))


def zero_lines(zero: Mapping[Matrix, Sequence[float]], groups: Mapping[Matrix, int]) -> list[str]:
    """A line for every expert's matrix with such groups.

    Args:
        zero: of each matrix, for each expert, their number.
        groups: of each matrix, the number of all groups of an expert.
    """
    return [
        f"expert {expert}: {matrix}: {count:.0f} of {groups[matrix]} groups are all zero, scale 1"
        for matrix in MATRICES
        for expert, count in enumerate(zero[matrix])
        if count
    ]


def fallbacks(numbers: Numbers, found: Survey, settings: Experts, groups: Mapping[Matrix, int]) -> list[str]:
    """One line for every expert that did not get what the recipe asks for; a smaller share is part of the method.

    Args:
        groups: see `zero_lines`.
    """
    lines = []
    if left := found.rows - found.blended.tokens:
        lines.append(f"{left} rows of the block's input left out: not finite, or too large")
    columns = (numbers[name].tolist() for name in ("seen", "dropped", "routed_tokens", "share"))
    for expert, (rows, left_out, count, share) in enumerate(zip(*columns, strict=True)):
        name = f"expert {expert}"
        if left_out:
            lines.append(
                f"{name}: {left_out:.0f} of {rows + left_out:.0f} rows not finite or too large, left out of the sums"
            )
        if settings.routed_weight and not share:
            lines.append(f"{name}: {count:.0f} routed tokens, so all tokens count alike for it")
    for key, damping in numbers.items():
        matrix = key.removeprefix("damping.")
        for expert, used in enumerate(damping.tolist() if matrix != key else ()):
            if math.isinf(used):
                lines.append(f"expert {expert}: {matrix}: rounded to nearest, because its Hessian is not usable")
            elif used > 1.5 * DAMPING:
                lines.append(f"expert {expert}: {matrix}: damping raised to {used:g}")
    return lines + zero_lines({matrix: numbers[f"{matrix}_zero"].tolist() for matrix in MATRICES}, groups)
