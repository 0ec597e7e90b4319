"""w2 adjusted to the inputs that it will really get: those of the rounded w1 and w3.

Rounding w1 and w3 changes w2's input from h + d, which the source's w1 and w3 would give, to h. The matrix
that comes closest to w2 (h + d) when it reads h instead is a ridge regression towards w2,

    w2* = w2 + w2 (Σ d hᵀ) (Σ h hᵀ + λ I)⁻¹,

and it is w2* that is then rounded. Tokens are weighted as in all sums, but Σ d hᵀ runs only over those that the
router sends to the expert: only their error reaches the model's output.
"""

from __future__ import annotations

import torch

from .rounding import damped


def corrected(down: torch.Tensor, gram: torch.Tensor, changes: torch.Tensor, damping: float) -> torch.Tensor:
    """w2* (c, H, I) float32, see the module's docstring; w2 where there is no solution.

    Args:
        down: (c, H, I) float32, w2.
        gram: Σ h hᵀ (c, I, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, see `expert_sums.WidthSums`.
        damping: λ, as a share of the Gram matrix's mean diagonal.
    """
    share = torch.full_like(gram[:, 0, 0], damping)
    lower, info = torch.linalg.cholesky_ex(damped(gram, share))
    step = torch.cholesky_solve((down @ changes).mT, lower).mT
    solved = (info == 0) & torch.isfinite(torch.linalg.vector_norm(step, torch.inf, dim=(-2, -1)))
    return step.masked_fill_(~solved[:, None, None], 0).add_(down)
