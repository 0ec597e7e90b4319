"""Products with symmetric matrices, of which only one half is computed, by pairs of blocks of columns.

Both a Hessian aᵀ b and the loss tr(D H Dᵀ) are sums over pairs of columns that do not depend on the pair's order.

Legend: E matrices, T tokens, R rows, C columns, b columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantizers.device.devices import is_accelerator

SMALLEST = 128  # columns: below that a matmul wastes more than it saves
BLOCKS = 8


def blocks(columns: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) column of every block."""
    width = max(SMALLEST, -(-columns // BLOCKS))
    return ((start, min(start + width, columns)) for start in range(0, columns, width))


def transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b with float32 accumulation and result, for (T, M) and (T, N) of one dtype."""
    if a.dtype != torch.float32 and is_accelerator(a.device):
        return torch.mm(a.mT, b, out_dtype=torch.float32)
    return a.float().mT @ b.float()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (E, M, N) float32 += aᵀ b of (E, T, M) and (E, T, N), with float32 sums for any dtype of both factors."""
    if a.dtype == torch.float32:
        total.baddbmm_(a.mT, b)
    elif is_accelerator(a.device):  # `total` as `self` and as `out`: in place
        torch.baddbmm(total, a.mT, b, torch.float32, out=total)
    else:
        total.baddbmm_(a.float().mT, b.float())


def add_hessian(total: Tensor, rows: Tensor) -> None:
    """total (E, C, C) or (C, C) float32 += Σ x xᵀ of the rows (E, T, C) or (T, C), in the lower blocks.

    Call `mirror` once all is added.
    """
    rows = rows if is_accelerator(rows.device) else rows.float()
    if total.dim() == 2:
        total, rows = total.unsqueeze(0), rows.unsqueeze(0)
    for start, end in blocks(total.shape[-1]):
        add_product(total[:, start:, start:end], rows[..., start:], rows[..., start:end])


def mirror(total: Tensor) -> Tensor:
    """Copy the lower triangle to the upper one, in place: (E, C, C), then exactly symmetric."""
    for start, end in blocks(total.shape[-1]):
        block = total[..., start:end, start:end]
        below = block.tril(-1)
        block.tril_().add_(below.mT)
        total[..., start:end, end:] = total[..., end:, start:end].mT
    return total


def row_losses(delta: Tensor, hessian: Tensor) -> Tensor:
    """d H dᵀ (E, R) of each row d of D, `delta` (E, R, C); their sum is tr(D H Dᵀ) = ‖D X‖².

    The hessian is symmetric (E, C, C), or (1, C, C) where all share it.
    """
    columns = delta.mT if delta.stride(-2) == 1 else delta.mT.contiguous()  # (E, C, R)
    hessian = hessian.expand(len(columns), -1, -1)
    product = torch.empty_like(columns)
    for start, end in blocks(columns.shape[1]):
        # The block with itself counts once, each of those after it twice.
        own = columns[:, start:end]
        after = columns[:, end:]
        made = product[:, start:end]
        torch.bmm(hessian[:, start:end, start:end], own, out=made)
        if end < columns.shape[1]:
            made.baddbmm_(hessian[:, start:end, end:], after, alpha=2)
    product.mul_(columns)
    # One kernel on a GPU, where the sum in writing is hundreds of them.
    return product.sum(-2) if is_accelerator(product.device) else ordered_sum(product)


# A sum whose order is written down, so that every device and every kernel gives the same bits.

LANES = 8  # terms that are added side by side


def ordered_sum(terms: Tensor) -> Tensor:
    """The sum (…, R) of terms (…, g, R) float32: in 8 lanes, each from left to right, then neighbouring lanes in pairs.

    With g not divisible by 8 there are 4, 2 or 1 lanes. The terms are overwritten.
    """
    count = terms.shape[-2]
    lanes = min(LANES, count & -count)
    by_lane = terms.view(*terms.shape[:-2], -1, lanes, terms.shape[-1])
    total = by_lane[..., 0, :, :]
    for more in by_lane.unbind(-3)[1:]:
        total += more
    while total.shape[-2] > 2:
        even = total[..., ::2, :]
        even += total[..., 1::2, :]
        total = even
    return total.sum(-2)  # of two at most, which has only one order
