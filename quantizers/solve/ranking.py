"""The best point of a search, without computing the loss of every point exactly.

All points are ranked with products that keep 11 bits of each factor (TF32), where a card makes these several times as
fast as those of whole float32. The best few, and the identity, are then computed exactly, and the best of these is
chosen. It is taken for the best of all if no other point would be better with a rough loss as wrong as BOUND says;
whoever searches looks at that afterwards, and searches exactly where it is not so.

How wrong a loss is: a factor is rounded, or cut off, to 11 bits, so by at most 2⁻¹⁰ of it, and by u = 2⁻¹¹ on average
if it is cut off. Two factors make each product in the loss Σ d_i G_ik d_k smaller by 2 u on average, and what is left
goes either way: of G's errors with a variance of (u S)² at most, where S = Σ d_i² G_ii, since G_ik² ≤ G_ii G_kk. So 4 u
of the loss, or of S where that is more, leaves as much again for chance. Measured on layers with heavy tails and
outliers, losses were wrong by 2.5 u at most where factors were cut off, and by 0.8 u where they were rounded. That is a
wide margin and no proof: of a single row, made so that blocks of columns cancel each other, a loss was wrong by 9 u of
S, though by less than 2 u of 256 such rows. Even then a point about as good as the best is chosen, and the same one
every time.

Legend: E experts, R rows, C columns, P points, F of them computed exactly.
"""

from __future__ import annotations

import torch

from quantizers.device.rough import rough_products, worthwhile

from .awq import scale_losses, tried_errors
from .symmetric import row_losses

BOUND = 2**-9  # 4 u
OTHERS = 3  # points beside the identity that are computed exactly; nearly always fewer are as good as the best


def tried(
    weight: torch.Tensor, gram: torch.Tensor, scales: torch.Tensor, group: int, bits: int, *, careful: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The candidates whose loss is computed exactly, which may be all of them.

    Args:
        weight, gram, scales, group, bits: as for `awq.scale_losses`, with B = E.
        careful: False has them ranked first, where that is worthwhile.

    Returns:
        The candidates (F, E, C), their losses (F, E), and `unproven` if they were ranked.
    """
    if careful or not worthwhile(weight.device) or len(scales) <= OTHERS + 1:
        return scales, scale_losses(weight, gram, scales, group, bits), None
    rough, bound = rough_losses(weight, gram, scales, group, bits)
    points = finalists(rough)
    scales = scales.gather(0, points.unsqueeze(-1).expand(-1, -1, scales.shape[-1]))
    exact = scale_losses(weight, gram, scales, group, bits)
    return scales, exact, unproven(rough, bound, points, exact)


def rough_losses(
    weight: torch.Tensor, gram: torch.Tensor, scales: torch.Tensor, group: int, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `awq.scale_losses`, roughly; and by how much each loss may be wrong, (P, E) float32."""
    losses, bounds = [], []
    diagonal = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # (E or 1, C, 1)
    for errors in tried_errors(weight, scales, group, bits):
        experts, _, points, rows = errors.shape
        with rough_products():
            found = row_losses(errors.flatten(2).mT, gram).view(experts, points, rows).sum(-1)
        sizes = torch.linalg.vector_norm(errors, dim=-1).square_().mul_(diagonal).sum(1)
        losses.append(found)
        bounds.append(torch.maximum(found, sizes).mul_(BOUND))
    rough, bound = torch.cat(losses, 1).T, torch.cat(bounds, 1).T
    finite = torch.isfinite(rough)
    return torch.where(finite, rough, torch.inf), torch.where(finite, bound, 0)


def finalists(rough: torch.Tensor) -> torch.Tensor:
    """The points (F, E) int64 of each expert that are to be computed exactly, in their order; the identity is first.

    Args:
        rough: (P, E), see `rough_losses`.
    """
    best = rough[1:].argsort(dim=0, stable=True)[:OTHERS].sort(0).values + 1
    return torch.cat([torch.zeros_like(best[:1]), best])


def unproven(rough: torch.Tensor, bound: torch.Tensor, chosen: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of which experts (E,) bool another point than those computed exactly might be the best.

    Args:
        rough, bound: (P, E), see `rough_losses`.
        chosen: (F, E), see `finalists`.
        exact: (F, E), the losses of these.
    """
    least = (rough - bound).scatter(0, chosen, torch.inf)
    return ~(least.amin(0) > exact.amin(0))
