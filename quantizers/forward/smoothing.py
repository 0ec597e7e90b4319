"""How close a quantized layer is to its source, once what AWQ moved between tensors is moved back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from quantizers.checkpoint.reader import Checkpoint
from quantizers.system.errors import CheckpointError

# A 4-bit group keeps a weight within about 8 % of its norm, GPTQ within 15 %. A matrix that was not
# scaled as its norm says, or belongs to another expert, is off by 50 % and more.
CLOSE_ENOUGH = 0.35
SAME_FACTOR = 2**-6


def norm_ratio(source: Checkpoint, candidate: Checkpoint, name: str) -> torch.Tensor:
    """source / candidate of a norm (H,), float32: what its readers must have been multiplied by; 1 where it is 0.

    Raises:
        CheckpointError: the candidate's norm is missing, of another shape, or not finite.
    """
    before = source.tensor(name).float()
    info = candidate.require(name, "a norm")
    after = candidate.tensor(info.name).float()
    if before.shape != after.shape or not bool(torch.isfinite(after).all()):
        raise CheckpointError(f"{info.file}: {name} is not finite, or of another shape than the source's")
    return torch.where(after != 0, before / after, torch.ones_like(before))


def row_scale(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """(R,) s that minimises ‖found − s · wanted‖ row by row; 1 where that is 0 or undefined."""
    power = wanted.square().sum(1)
    scale = (found * wanted).sum(1) / power.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where((power > 0) & (scale.abs() > 1e-12), scale, torch.ones_like(scale))


def matrix_errors(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], smooth: torch.Tensor) -> list[float]:
    """‖found − expected‖ / ‖expected‖ of an expert's gate, up and down, given the norm's ratio.

    The scale between up's rows and down's columns is not stored; it is read off up's rows by least
    squares, and down's columns must then carry its inverse.
    """
    gate, up, down = old[0] * smooth, old[1] * smooth, old[2]
    rows = row_scale(new[1], up)
    expected = (gate, up * rows.unsqueeze(1), down / rows)
    errors = []
    for found, wanted in zip(new, expected, strict=True):
        size = float(wanted.norm())
        errors.append(float((found - wanted).norm()) / size if size > 0 else float(found.norm()))
    return errors


def router_state(
    before: torch.Tensor, after: torch.Tensor, smooth: torch.Tensor
) -> Literal["compensated", "not compensated", "unclear"]:
    """Whether a router (E, H) is the source's, or the source's times the norm's ratio (H,).

    Each channel's factor is found by least squares, so that bfloat16 arithmetic, several times rounded, does
    not blur the answer.
    """
    factor = row_scale(after.float().mT, before.float().mT)  # (H,)
    if bool(((factor / smooth - 1).abs() < SAME_FACTOR).all()):
        return "compensated"
    return "not compensated" if bool(((factor - 1).abs() < SAME_FACTOR).all()) else "unclear"
