"""Scales that AWQ folded into norms and matrices: undone, to compare a quantized layer with its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import matrix_norm

from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import CheckpointError

# Relative error of a matrix: about 8 % with 4-bit groups and rounding to nearest, up to 15 % with GPTQ; twice that with
# each bit less. A matrix with scales that do not match its norm is off by 50 % and more, another expert's by 100 %.
CLOSE_ENOUGH = 0.35
SAME_FACTOR = 2**-6


def close_enough(bits: int) -> float:
    """The relative error below which a matrix of so many bits is the source's."""
    return {2: 0.9, 3: 0.6}.get(bits, CLOSE_ENOUGH)


def norm_ratio(before: Tensor, after: Tensor, offset: int) -> Tensor:
    """The scale (H,) float32 by which a norm was divided, and its readers multiplied; 1 where it is 0 now.

    To both stored norms the model adds `offset`.
    """
    source, divided = offset + before.float(), offset + after.float()
    return torch.where(divided != 0, source / divided, 1)


def stored_norm_ratio(source: Checkpoint, candidate: Checkpoint, name: str, offset: int) -> Tensor:
    """`norm_ratio` of a norm in two checkpoints; a CheckpointError if the candidate's is missing, or unfit."""
    before = source.tensor(name)
    info = candidate.require(name, "a norm")
    after = candidate.tensor(info.name)
    if before.shape != after.shape or not bool(torch.isfinite(after.float()).all()):
        raise CheckpointError(info.file, f"{name} is not finite, or has another shape than the source's")
    return norm_ratio(before, after, offset)


def row_scale(actual: Tensor, wanted: Tensor) -> Tensor:
    """(…, R) the scale s that minimizes ‖actual − s · wanted‖ for each row of (…, R, C); 1 where 0 or undefined."""
    power = wanted.square().sum(-1)
    scale = (actual * wanted).sum(-1) / power.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where((power > 0) & (scale.abs() > 1e-12), scale, 1)


def matrix_errors(old: Sequence[Tensor], new: Sequence[Tensor], smooth: Tensor, *, inner: int) -> Tensor:
    """Relative errors ‖actual − expected‖ / ‖expected‖ of gate (if there is one), up and down, given the norm's ratio.

    The scale between up's rows and down's columns is not stored. It is estimated from up's rows by least
    squares, and down's columns must then have been divided by it, or a power of it. Experts with a gate of their own
    have none.

    Args:
        old, new: gate, if any, and up (…, I, H) and down (…, H, I), of one expert or of several, float32.
        smooth: the norm's ratio (H,).
        inner: the degree of down's inputs in up's rows, see architectures/gates.py; 0 where there is no such scale.

    Returns:
        (…, 3), or (…, 2), on the matrices' device, which nothing here waits for.
    """
    *gate, up = (matrix * smooth for matrix in old[:-1])
    down = old[-1]
    rows = row_scale(new[-2], up) if inner else torch.ones_like(up[..., 0])
    rows = rows if gate else rows.abs()  # an activation lets no other sign through
    divided = down / (rows if inner < 2 else rows.pow(inner)).unsqueeze(-2)
    expected = (*gate, up.mul_(rows.unsqueeze(-1)), divided)
    errors = []
    for actual, wanted in zip(new, expected, strict=True):
        size = matrix_norm(wanted)
        errors.append(torch.where(size > 0, matrix_norm(wanted.sub_(actual)) / size, matrix_norm(actual)))
    return torch.stack(errors, -1)


def is_uncompensated(before: Tensor, after: Tensor, smooth: Tensor) -> bool:
    """Whether a matrix (R, H), perhaps a quantized one, is the source's, not the source's times the ratio (H,)."""
    compensated, unchanged = (
        float((after - wanted).norm() / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))
        for wanted in (before * smooth, before)
    )
    return unchanged < CLOSE_ENOUGH and unchanged <= compensated


def router_state(before: Tensor, after: Tensor, smooth: Tensor) -> Literal["compensated", "not compensated", "unclear"]:
    """Whether a router (E, H) equals the source's, or the source's multiplied by the norm's ratio (H,).

    Each channel's factor is estimated by least squares over all experts, which averages out the errors of
    repeated rounding to bfloat16.
    """
    factor = row_scale(after.float().mT, before.float().mT)  # (H,)
    if bool(((factor / smooth - 1).abs() < SAME_FACTOR).all()):
        return "compensated"
    return "not compensated" if bool(((factor - 1).abs() < SAME_FACTOR).all()) else "unclear"
