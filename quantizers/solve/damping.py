"""Damping: what is added to a Hessian's diagonal so that it can be factorized, and ten times as much where it cannot.

A Hessian Σ x xᵀ over fewer tokens than columns is singular, and summing in float32 can leave another one indefinite.
GPTQ (Frantar et al., https://arxiv.org/abs/2210.17323, its Step 3) therefore adds λ I with λ = 1 % of the mean
diagonal. An expert whose Hessian is not positive definite even then gets ten times as much, again and again; what no
damping helps is rounded to nearest. The ridge correction of w2 and the sweeps after GPTQ damp their Hessians likewise.

Legend: E experts, C columns. `damping` (E,) is λ as a share of the mean diagonal; infinite where nothing helped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from quantizers.device.prefetch import tensor_to_host

DAMPING = 0.01  # as a share of the mean diagonal
RAISED = 10  # how many times as much is tried next
ATTEMPTS = 4  # dampings that are tried


def least_damping(hessian: Tensor) -> Tensor:
    """DAMPING for each expert (E,) of a hessian (E, C, C)."""
    return torch.full_like(hessian[:, 0, 0], DAMPING)


def damped(hessian: Tensor, damping: Tensor) -> Tensor:
    """hessian (E, C, C) + damping (E,) times its mean diagonal on the diagonal; 1 where that is not finite or zero."""
    added = damping * hessian.diagonal(dim1=-2, dim2=-1).mean(-1)
    added = torch.where(torch.isfinite(added) & (added > 0), added, 1)
    result = hessian.clone()
    result.diagonal(dim1=-2, dim2=-1).add_(added.unsqueeze(-1))
    return result


def damped_cholesky(hessian: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lower Cholesky factor (E, C, C) of each damped Hessian, whether none was found (E,) bool, and the damping (E,).

    Args:
        hessian: (E, C, C) float32, symmetric. Its diagonal is overwritten.
        mean: (E,), of the diagonal, summed in the order of the columns: in another order it may round otherwise.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    before = diagonal.clone()  # (E, C)
    damping = torch.full_like(mean, DAMPING)
    for _ in range(ATTEMPTS):
        torch.add(before, (damping * mean).unsqueeze(-1), out=diagonal)
        lower, info = torch.linalg.cholesky_ex(hessian)
        # cuSOLVER finds no fault in NaN off the diagonal, which reaches the factor's.
        finite = torch.isfinite(lower.diagonal(dim1=-2, dim2=-1)).all(-1)
        failed = (info != 0) | ~finite | ~torch.isfinite(mean) | (mean <= 0)
        if not bool(tensor_to_host(failed.any())):
            break
        damping = torch.where(failed, damping * RAISED, damping)
    return lower, failed, damping.masked_fill_(failed, torch.inf)


def damping_lines(matrix: str, damping: Iterable[float]) -> list[str]:
    """A line of the report for every expert whose damping was raised, or was in vain."""
    lines = []
    for expert, share in enumerate(damping):
        if math.isinf(share):
            lines.append(f"expert {expert}: {matrix}: rounded to nearest, because its Hessian is not usable")
        elif share > 1.5 * DAMPING:
            lines.append(f"expert {expert}: {matrix}: damping raised to {share:g}")
    return lines
