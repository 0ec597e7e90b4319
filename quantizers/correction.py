"""w2 solved for the inputs that it will be served: those of the rounded w1 and w3.

Legend: T tokens, H hidden, I expert width, c experts of a chunk; h (T, I) is what w2 would read from the
source's w1 and w3, h' what it reads from the rounded ones.

Rounding w1 and w3 changes w2's inputs before w2 is rounded. The matrix that comes closest to w2 h when it
is given h' is a ridge regression towards w2 itself,

    w2* = w2 + w2 (C − G') (G' + d I)⁻¹,    C = Σ h h'ᵀ,  G' = Σ h' h'ᵀ  (both weighted as all sums are),

and it is w2* that is then rounded, with G'. The damping d keeps directions that h' hardly shows as they were.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .rounding import damped
from .statistics import Activation, Blend, Recorded, token_weights, usable
from .symmetric import add_gram, gram, mirror


def served_sums(
    sequences: Iterable[Recorded],
    gate_up: torch.Tensor,
    served: torch.Tensor,
    smooth: torch.Tensor,
    s: torch.Tensor,
    activation: Activation,
    blended: Blend,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """G' and C of experts first … first + c - 1, each of total weight 1.

    Args:
        sequences: the layer's recorded sequences, in order.
        gate_up: (c, 2I, H), the source's w1 above w3, in the dtype of x.
        served: (c, 2I, H) float32, the rounded ones: they read x / smooth, and w3's rows are divided by s.
        smooth: (H,) float32, what the norm was divided by.
        s: (c, I) float32, what w3's rows were divided by.

    Returns:
        G' and C, both (c, I, I) float32, in the basis of h / s.
    """
    chunk, double_width, _ = gate_up.shape
    last, width, device = first + chunk, double_width // 2, gate_up.device
    # One rounding of the weights to the dtype of the forward pass, as a server does it.
    rounded = (served / smooth).to(gate_up.dtype)
    total, cross = (torch.zeros(chunk, width, width, device=device) for _ in range(2))
    mass = torch.zeros(chunk, 1, 1, device=device)
    for sequence in sequences:
        x = sequence.x
        gate, up = torch.matmul(x, gate_up.mT).chunk(2, dim=-1)
        h = activation(gate) * up / s.unsqueeze(1).to(x.dtype)
        gate, up = torch.matmul(x, rounded.mT).chunk(2, dim=-1)
        h_served = activation(gate) * up
        good = usable(h) & usable(h_served) & usable(x)  # (c, T)
        h, h_served = (torch.where(good.unsqueeze(-1), rows, torch.zeros_like(rows)) for rows in (h, h_served))
        weight = token_weights(sequence, blended, first, last) * good
        weighted = h_served * weight.unsqueeze(-1).to(h.dtype)
        add_gram(total, weighted, h_served)
        cross += gram(h, weighted)
        mass += weight.sum(1)[:, None, None]
    mass = mass.clamp(min=torch.finfo(torch.float32).tiny)
    return mirror(total) / mass, cross / mass


def corrected(down: torch.Tensor, total: torch.Tensor, cross: torch.Tensor, damping: float) -> torch.Tensor:
    """w2* (c, H, I) float32 for w2 (c, H, I), see the module's docstring; w2 where there is no solution.

    Args:
        total, cross: G' and C, (c, I, I) float32.
        damping: d, as a share of the mean diagonal of G'.
    """
    share = torch.full_like(total[:, 0, 0], damping)
    lower, info = torch.linalg.cholesky_ex(damped(total, share))
    missing = down @ (cross - total)  # (c, H, I)
    step = torch.cholesky_solve(missing.mT, lower).mT
    solved = (info == 0) & torch.isfinite(step).all(-1).all(-1)
    return torch.where(solved[:, None, None], down + step, down)
