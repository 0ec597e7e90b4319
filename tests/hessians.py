"""Hessians as inputs have them, and as they should not be."""

from __future__ import annotations

import torch


def correlated_hessian(seed: int, experts: int, columns: int, tokens: int) -> torch.Tensor:
    """(E, C, C) Hessians of inputs that are mixtures of few directions, with outlier columns."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(experts, columns // 4, columns, generator=generator)
    x = torch.randn(experts, tokens, columns // 4, generator=generator) @ directions / (columns // 4) ** 0.5
    x = x + 0.3 * torch.randn(experts, tokens, columns, generator=generator)
    x = x * torch.randn(experts, 1, columns, generator=generator).mul(0.7).exp()
    x[:, :, columns // 5] *= 12
    return (x.double().mT @ x.double() / tokens).float()


def broken_hessians(size: int) -> torch.Tensor:
    """Zero, NaN, NaN off the diagonal only, infinity, hopelessly indefinite; the last one is healthy."""
    hessians = torch.eye(size).repeat(6, 1, 1)
    hessians[0] = 0
    hessians[1] = float("nan")
    hessians[2, 1, 3] = hessians[2, 3, 1] = float("nan")
    hessians[3, 2, 2] = float("inf")
    hessians[4, 0, 1] = hessians[4, 1, 0] = 1e6
    hessians[5] += 0.1
    return hessians
