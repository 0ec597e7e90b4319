"""The factor by which GPTQ spreads errors: of the inverse of a Gram matrix, without inverting it first.

Legend: E experts, C columns.
"""

from __future__ import annotations

import torch

ATTEMPTS = 4  # dampings tried, each ten times the one before


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
    for _ in range(ATTEMPTS if careful else 1):
        torch.add(before, (used * mean).unsqueeze(-1), out=diagonal)
        lower, info = torch.linalg.cholesky_ex(work)
        failed = (info != 0) | ~torch.isfinite(mean) | (mean <= 0)
        if careful and not bool(failed.any()):
            break
        used = torch.where(failed, used * 10, used)
    used.masked_fill_(failed, torch.inf)
    _set_identity(lower, failed)
    _set_identity(work, torch.ones_like(failed))
    # The solver wants columns in one piece, and so it gets them: as it overwrites the identity, nothing is copied.
    torch.linalg.solve_triangular(lower, work.mT, upper=False, out=work.mT)
    return work.mT.flip(-1, -2), used


def _set_identity(matrices: torch.Tensor, where: torch.Tensor) -> None:
    """Make those of (E, C, C) the identity where (E,) says so."""
    matrices.masked_fill_(where[:, None, None], 0)
    matrices.diagonal(dim1=-2, dim2=-1).masked_fill_(where.unsqueeze(-1), 1)
