"""After GPTQ: every group's scale and codes once more, given all the others.

Legend: E experts, R rows, C columns, g group size, n = C / g groups, G the columns' Hessian.

GPTQ decides each column once, with scales fixed beforehand. With P = (W − Ŵ) G at hand, the loss
tr((W − Ŵ) G (W − Ŵ)ᵀ) is a parabola in a single group's scale, and in a single code, so each can be
set to its best value in turn: block coordinate descent, by which the loss never rises. A panel of columns gets its
part of P by one matmul, and each of its groups by another the changes of the groups before it, so that a sweep
multiplies by G once. `refine_group` keeps the rule of kernels.py: a kernel takes its place on a GPU.
"""

from __future__ import annotations

import torch

from quantizers.device.triton_support import use_kernel
from quantizers.formats.packed_integers import code_range, dequantize

from . import kernels
from .symmetric import ordered_sum

PANEL = 256  # columns, rounded down to whole groups


def refine(
    weight: torch.Tensor, hessian: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bits: int, *, sweeps: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sweeps over all groups of columns.

    Args:
        weight: (E, R, C) float32.
        hessian: (E, C, C) float32, damped, so that its diagonal is positive.
        codes: (E, R, C) int8.
        scale: (E, R, n) bfloat16.

    Returns:
        Codes and scales of the same shapes and dtypes; scales stay positive and rounded to bfloat16.
    """
    group = codes.shape[2] // scale.shape[2]
    # Everything is transposed, (E, C, R) and (E, n, R): a column is contiguous.
    difference = dequantize(codes, scale)
    difference = torch.sub(weight, difference, out=difference).mT.contiguous()
    codes, scale = (tensor.mT.clone(memory_format=torch.contiguous_format) for tensor in (codes, scale))
    by_group = hessian.view(len(hessian), -1, group, hessian.shape[2] // group, group)
    blocks = by_group.diagonal(dim1=1, dim2=3).movedim(-1, 1).contiguous()  # (E, n, g, g)
    for _ in range(sweeps):
        _sweep(hessian, blocks, codes, scale, difference, bits=bits)
    return codes.mT.contiguous(), scale.mT.contiguous()


def _sweep(
    hessian: torch.Tensor,
    blocks: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    difference: torch.Tensor,
    *,
    bits: int,
) -> None:
    """Set all codes (E, C, R) and scales (E, n, R), and with them (W − Ŵ)ᵀ (E, C, R); blocks (E, n, g, g) of G."""
    experts, columns, rows = codes.shape
    group = columns // scale.shape[1]
    panel = max(1, PANEL // group) * group
    refine_one = kernels.refine_group if use_kernel("refine_group", codes.device) else refine_group
    for first in range(0, columns, panel):
        chosen = slice(first, min(first + panel, columns))
        near = torch.bmm(hessian[:, chosen], difference)  # Pᵀ
        change = codes[:, chosen].float()
        groups = slice(first // group, chosen.stop // group)
        image = blocks[:, groups] @ change.view(experts, -1, group, rows)
        for at in range(groups.start, groups.stop):
            whole = slice(at * group, (at + 1) * group)
            part = slice(whole.start - first, whole.stop - first)
            if part.start:
                near[:, part].baddbmm_(hessian[:, whole, first : whole.start], change[:, : part.start])
            refine_one(
                blocks[:, at], scale[:, at], near[:, part],
                image[:, at - groups.start], codes[:, whole], change[:, part], bits,
            )  # fmt: skip
        difference[:, chosen].add_(change)


def refine_group(
    block: torch.Tensor,
    scale: torch.Tensor,
    near: torch.Tensor,
    image: torch.Tensor,
    codes: torch.Tensor,
    change: torch.Tensor,
    bits: int,
) -> None:
    """Set one group's scale, and then its codes; arguments are those of `kernels.refine_group`."""
    old, before = scale.float(), codes.float()
    curvature, gradient = ordered_sum(torch.stack((image, near)).mul_(before))
    rounded = (old + gradient / curvature.clamp(min=torch.finfo(torch.float32).tiny)).bfloat16()
    step = rounded.float() - old
    # Rounded to bfloat16 the step may overshoot: take it only where the parabola is lower there.
    better = (2 * gradient - step * curvature) * step > 0
    better &= (rounded > 0) & torch.isfinite(rounded)
    scale.copy_(torch.where(better, rounded, scale))
    near.sub_(image.mul_(torch.where(better, step, torch.zeros_like(step)).unsqueeze(1)))
    now = scale.float()
    inverse = (1 / block.diagonal(dim1=-2, dim2=-1)).unsqueeze(-1)  # (E, g, 1)
    after = torch.empty_like(before)
    columns = (tensor.unbind(1) for tensor in (near, inverse, before, after))
    for j, (slope, inverted, code, best) in enumerate(zip(*columns, strict=True)):
        torch.mul(slope, inverted, out=best).div_(now).add_(code).round_().clamp_(*code_range(bits))
        moved = torch.sub(best, code).mul_(now)
        later = torch.mul(block[:, j + 1 :, j, None], moved.unsqueeze(1), out=image[:, j + 1 :])
        near[:, j + 1 :].sub_(later)
    codes.copy_(after)
    torch.mul(before, old.unsqueeze(1), out=change)
    change.sub_(torch.mul(codes, now.unsqueeze(1), out=image))
