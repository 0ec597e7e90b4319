"""Hessians of the inputs of w2, Σ h hᵀ: every token through every expert of an expert batch.

Legend: T rows of a token chunk, H hidden, I expert width, c experts of an expert batch, m rows routed to an expert
(padded); x (T, H) is what w1 and w3 read, h (T, I) = act(x w1ᵀ) * (x w3ᵀ) what w2 reads. h is transposed, (c, I, T):
one matmul then gives it for all experts of the batch, and each half of the result is contiguous.

Hessians are float32 and added token chunk by token chunk, in order, one chunk a matmul: torch does not promise the same
bits for other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantizers.device.devices import is_accelerator
from quantizers.device.timing import asked_for, phase
from quantizers.device.triton_support import use_kernel
from quantizers.forward.moe_inputs import MoeInputs, usable_rows

from .input_hessian import ExpertBatch
from .kernels import launch
from .routing_weights import Blend, Routed, Survey, rows_of, token_roots
from .symmetric import add_hessian, add_product, mirror

Activation = Callable[[torch.Tensor], torch.Tensor]


def gated(products: torch.Tensor, activation: Activation) -> torch.Tensor:
    """h (c, I, T) = act(x w1ᵀ) * (x w3ᵀ), from x w1ᵀ above x w3ᵀ (c, 2I, T)."""
    gate, up = products.chunk(2, dim=1)
    return activation(gate).mul_(up)


def gated_and_looked_at(products: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gated`, and which rows are usable (c, T); in the others h is worth nothing, and perhaps not finite."""
    h = gated(products, activation)
    return h, usable_rows(h, 1)


def no_magnitude(like: torch.Tensor, width: int) -> torch.Tensor:
    """What `add_weighed` adds to, before the first row: (c, I, …) float32, together Σ w |h|.

    Args:
        like: (c, …), of the dtype of h and where that lies.
        width: I.
    """
    return torch.zeros(len(like), width, launch.SUMS if _by_kernel(like) else 1, device=like.device)


def add_weighed(h: torch.Tensor, root: torch.Tensor, total: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Add Σ w h hᵀ to `total` and w |h| to `magnitude`.

    Args:
        h: (c, I, T), overwritten.
        root: √w (c, T), of the same dtype; 0 for rows that are left out, whatever h is there.
        total: (c, I, I) float32, see `symmetric.add_gram`.
        magnitude: see `no_magnitude`.
    """
    if _by_kernel(h):
        launch.weigh_rows(h, root, magnitude)
        add_hessian(total, h.mT, h.mT)
        return
    weigh_rows(h, root)
    add_hessian(total, h.mT, h.mT)
    magnitude += h.abs_().mul_(root.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32)


def weigh_rows(h: torch.Tensor, root: torch.Tensor) -> None:
    """h *= root, zero where root is, whatever h is there; arguments are those of `add_weighed`."""
    left_out = root == 0
    if is_accelerator(h.device) or bool(left_out.any()):
        h.masked_fill_(left_out.unsqueeze(1), 0)
    h.mul_(root.unsqueeze(1))


def _by_kernel(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and use_kernel("weigh_rows", tensor.device)


ROUTED_PER_COLUMN = 32  # tokens routed for each column of w2: with more, every n-th block goes into `changes`


@dataclass
class DownHessian:
    """Blended Hessians of h for the experts of a batch, each of total weight 1.

    Attributes:
        hessian: Σ h hᵀ (c, I, I) float32.
        mean: mean |h| (c, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, where h + d is what the source's w1 and w3 give; over routed
            tokens only, weighted as in the blend. None where it was not asked for.
        seen: (c,) int64, rows of h that went into the Hessian.
        dropped: (c,) int64, rows left out: not usable themselves, or in the block's input.
    """

    hessian: torch.Tensor
    mean: torch.Tensor
    changes: torch.Tensor | None
    seen: torch.Tensor
    dropped: torch.Tensor


def collect_down_hessian(
    blocks: Sequence[MoeInputs],
    found: Survey,
    gate_up: torch.Tensor,
    *,
    activation: Activation,
    unit: ExpertBatch,
    source: torch.Tensor | None = None,
    every: int = 1,
) -> DownHessian:
    """Hessians of an expert batch, from every token through every expert of it.

    Args:
        blocks, found: see `routing_weights.survey`.
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x; rounded or not.
        activation: of the gate, usually SiLU.
        unit: first and last (exclusive) of its experts.
        source: (c, 2I, H) of the same dtype: the weights that `gate_up` was rounded from, for `changes`.
        every: read every n-th block only.
    """
    count, double_width, _ = gate_up.shape
    width, device = double_width // 2, gate_up.device
    sums = _Sums(
        torch.zeros(count, width, width, device=device),
        no_magnitude(gate_up, width),
        torch.zeros(count, 1, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        None if source is None else torch.zeros(count, width, width, device=device),
        torch.zeros(count, dtype=torch.float64, device=device),
    )
    step = max(1, found.routed() // (ROUTED_PER_COLUMN * width))
    products = torch.empty(0, device=device, dtype=gate_up.dtype)
    rows = 0
    numbered = zip(range(0, len(blocks), every), blocks[::every], strict=True)
    for number, block in asked_for("forced pass", numbered):  # beside which the next block crosses
        table = found.tables[number]
        rows += len(block.x)
        if products.shape[-1] != len(block.x):  # else the memory of the last block is used again
            products = gate_up.new_empty(count * double_width, len(block.x))
        with phase("changes"):
            routed = list(table.routed(*unit)) if source is not None and number % step == 0 else []
        _add_block(sums, block, routed, found.blended, gate_up, source, products, activation=activation, unit=unit)
    mass = sums.mass.clamp(min=torch.finfo(torch.float32).tiny)
    share = found.blended.share[unit[0] : unit[1]] / sums.routed_mass
    share = torch.where(sums.routed_mass > 0, share, torch.zeros_like(share)).float()
    return DownHessian(
        mirror(sums.total).div_(mass.unsqueeze(-1)),
        sums.magnitude.sum(-1) / mass,
        None if sums.changes is None else sums.changes.mul_(share[:, None, None]),
        sums.seen,
        rows - sums.seen,
    )


@dataclass
class _Sums:
    """What is added up block by block: see `DownHessian`, without being divided by the mass of all rows.

    `magnitude` is Σ w |h|, in parts, see `no_magnitude`.
    """

    total: torch.Tensor
    magnitude: torch.Tensor
    mass: torch.Tensor
    seen: torch.Tensor
    changes: torch.Tensor | None
    routed_mass: torch.Tensor


def _add_block(
    sums: _Sums,
    block: MoeInputs,
    routed: Sequence[Routed],
    blended: Blend,
    gate_up: torch.Tensor,
    source: torch.Tensor | None,
    products: torch.Tensor,
    *,
    activation: Activation,
    unit: ExpertBatch,
) -> None:
    """Add one block.

    Args:
        routed: the rows that go into `changes`, see `Table.routed`; none of a block that does not.
        source: as for `collect_down_hessian`.
        products: (c · 2I, T), memory for x w1ᵀ above x w3ᵀ; overwritten.
    """
    with phase("forced pass"):
        torch.mm(gate_up.flatten(0, 1), block.x.mT, out=products)
        h, good = gated_and_looked_at(products.view(len(gate_up), gate_up.shape[1], -1), activation)
    with phase("sums"):
        good &= block.usable  # (c, T)
        # √w in the dtype of h, so that one operand serves both sides of the sum; and w is what it is squared.
        root = token_roots(block, blended, *unit, good, h.dtype)
        sums.mass += root.float().square().sum(1, keepdim=True)
        sums.seen += good.sum(1)
    if source is not None and sums.changes is not None:
        with phase("changes"):
            for part in routed:
                sums.routed_mass += _add_changes(sums.changes, h, good, block.x, part, source, activation)
    with phase("sums"):
        add_weighed(h, root, sums.total, sums.magnitude)


def _add_changes(
    changes: torch.Tensor,
    h: torch.Tensor,
    good: torch.Tensor,
    x: torch.Tensor,
    routed: Routed,
    source: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """Add Σ r² d hᵀ over rows of a block to `changes`; returns their Σ r² (c,) in float64.

    Args:
        h: (c, I, T), from the rounded weights; worth nothing in rows that do not go into the sums.
        good: (c, T), which of its rows do.
        routed: one part of `Table.routed`.
    """
    rows, weight = routed
    wanted = gated(torch.bmm(source, rows_of(x, rows).mT), activation)  # (c, I, m)
    rows = rows.long()
    got = h.gather(2, rows.unsqueeze(1).expand(-1, h.shape[1], -1))
    kept = weight.square() * (usable_rows(wanted, 1) & good.gather(1, rows))
    left_out = (kept == 0).unsqueeze(1)
    d = wanted.sub_(got).mul_(kept.unsqueeze(1).to(h.dtype)).masked_fill_(left_out, 0)
    add_product(changes, d.mT, got.masked_fill_(left_out, 0).mT)
    return kept.double().sum(1)
