"""The factor by which GPTQ spreads errors: of the inverse of a Gram matrix, without inverting it first.

Legend: E experts, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from quantizers.device.factor import in_blocks

ATTEMPTS = 4  # dampings tried, each ten times the one before
BLOCK, STRIP = 256, 1024  # columns that are factorized at once, and that a product then updates


def inverse_factor(gram: torch.Tensor, damping: float, *, careful: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """U, upper triangular, with inverse(H) = Uᵀ U for the damped H = gram + d I.

    With A upper triangular and H = A Aᵀ, U is A's inverse; A comes from the Cholesky factor of H
    with rows and columns reversed. One factorization and one triangular solve, where inverting H
    first and factoring the inverse would need three.

    Args:
        gram: (E, C, C) float32, symmetric, positive semi-definite.
        damping: share of the mean diagonal that is added to the diagonal.
        careful: raise the damping where it is too small. That looks at a number, for which an accelerator stops;
            without it only the first damping is tried.

    Returns:
        U (E, C, C) and the damping used (E,): ten times as much, again and again, for an expert
        whose H is not positive definite; infinity where nothing helped, and U is the identity.
    """
    work = gram.flip(-1, -2)
    diagonal = work.diagonal(dim1=-2, dim2=-1)
    before = diagonal.clone()  # (E, C)
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # (E,)
    used = torch.full_like(mean, damping)
    by_blocks = in_blocks()
    for _ in range(ATTEMPTS if careful else 1):
        torch.add(before, (used * mean).unsqueeze(-1), out=diagonal)
        if by_blocks:
            lower, info = inverse_by_blocks(work.clone() if careful else work)
        else:
            lower, info = torch.linalg.cholesky_ex(work)
        failed = (info != 0) | ~torch.isfinite(mean) | (mean <= 0)
        if careful and not bool(failed.any()):
            break
        used = torch.where(failed, used * 10, used)
    used.masked_fill_(failed, torch.inf)
    _set_identity(lower, failed)
    if by_blocks:
        return lower.flip(-1, -2), used
    _set_identity(work, torch.ones_like(failed))
    # The solver wants columns in one piece, and so it gets them: as it overwrites the identity, nothing is copied.
    torch.linalg.solve_triangular(lower, work.mT, upper=False, out=work.mT)
    return work.mT.flip(-1, -2), used


def _set_identity(matrices: torch.Tensor, where: torch.Tensor) -> None:
    """Make those of (E, C, C) the identity where (E,) says so."""
    matrices.masked_fill_(where[:, None, None], 0)
    matrices.diagonal(dim1=-2, dim2=-1).masked_fill_(where.unsqueeze(-1), 1)


def inverse_by_blocks(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of the lower Cholesky factor, from products; only blocks on the diagonal are factorized.

    Args:
        matrices: (E, C, C) float32, of which the lower halves are read. Overwritten.

    Returns:
        The inverses in the same memory, lower triangular; and (E,) int32, not 0 where a matrix is not positive definite
        and its inverse is worth nothing.
    """
    experts, size, _ = matrices.shape
    cuts = [*range(0, size, BLOCK), size]
    info = torch.zeros(experts, dtype=torch.int32, device=matrices.device)
    for start, end in pairwise(cuts):
        own, below = matrices[:, start:end, start:end], matrices[:, end:, start:end]
        lower, failed = torch.linalg.cholesky_ex(own)
        info |= failed
        identity = torch.eye(end - start, dtype=own.dtype, device=own.device).expand_as(own)
        own.copy_(torch.linalg.solve_triangular(lower, identity, upper=False))
        below.copy_(below @ own.mT)  # which is the factor's
        for first in range(end, size, STRIP):
            last = min(first + STRIP, size)
            left, right = below[:, first - end :], below[:, first - end : last - end]
            matrices[:, first:, first:last].baddbmm_(left, right.mT, alpha=-1)
    _invert(matrices, cuts)
    return matrices.tril_(), info


def _invert(factor: torch.Tensor, cuts: Sequence[int]) -> None:
    """Lower factors whose blocks on the diagonal, between `cuts`, are inverted already: invert the rest, in place.

    With L = [[A, 0], [B, D]] the inverse has −D⁻¹ B A⁻¹ below A⁻¹ and D⁻¹.
    """
    if len(cuts) == 2:
        return
    middle = len(cuts) // 2
    _invert(factor, cuts[: middle + 1])
    _invert(factor, cuts[middle:])
    start, cut, end = cuts[0], cuts[middle], cuts[-1]
    first, last = factor[:, start:cut, start:cut].tril(), factor[:, cut:end, cut:end].tril()
    below = factor[:, cut:end, start:cut]
    below.copy_((last @ below @ first).neg_())
