"""Hessians of the inputs of w2, Σ h hᵀ: every token through every expert of an expert batch.

Legend: T rows of a token chunk, H hidden, I expert width, c experts of an expert batch, m rows routed to an expert
(padded); x (T, H) is what w1 and w3 read, h (T, I) what w2 reads: the gate of x w1ᵀ and x w3ᵀ, see gates.py. h is
transposed, (c, I, T): one matmul then gives it for all experts of the batch, and each half of the result is contiguous.

Hessians are float32 and added token chunk by token chunk, in order, one chunk a matmul: torch does not promise the same
bits for other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantizers.architectures.gates import Gate
from quantizers.device.devices import is_accelerator
from quantizers.device.timing import phase, timed_items
from quantizers.device.triton_support import use_kernel
from quantizers.model.moe_inputs import MoeInputs, usable_rows

from . import kernels
from .input_hessian import ExpertBatch
from .routing_weights import Routed, RoutingStatistics, rows_of, token_roots
from .symmetric import add_hessian, add_product, mirror

ROUTED_PER_COLUMN = 32  # routed tokens for each column of w2: with more, only every n-th chunk goes into `changes`


@dataclass
class DownHessian:
    """Blended Hessians of h for the experts of a batch, each of total weight 1.

    Attributes:
        hessian: Σ h hᵀ (c, I, I) float32.
        mean: mean |h| (c, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, where h + d is the source's; over routed tokens only, weighted as in the
            blend. None unless asked for.
        seen: (c,) int64, rows of h that went into the Hessian.
        dropped: (c,) int64, rows left out: not usable themselves, or in the layer's input.
    """

    hessian: torch.Tensor
    mean: torch.Tensor
    changes: torch.Tensor | None
    seen: torch.Tensor
    dropped: torch.Tensor


def collect_down_hessian(
    chunks: Sequence[MoeInputs],
    routing: RoutingStatistics,
    gate_up: torch.Tensor,
    *,
    gate: Gate,
    batch: ExpertBatch,
    source: torch.Tensor | None = None,
    every: int = 1,
) -> DownHessian:
    """Hessians of an expert batch, from every token through every expert of it.

    Args:
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x; rounded or not.
        gate: of the experts.
        source: (c, 2I, H) of the same dtype: the weights that `gate_up` was rounded from, for `changes`.
        every: read every n-th token chunk only.
    """
    count, width = len(gate_up), gate_up.shape[1] // 2
    zeros = partial(torch.zeros, device=gate_up.device)
    # Sums over token chunks, which are divided by the mass of all rows at the end.
    total, changes = zeros(count, width, width), None if source is None else zeros(count, width, width)
    magnitude = zeros(count, width, kernels.SUMS if _by_kernel(gate_up) else 1)
    mass, seen = zeros(count, 1), zeros(count, dtype=torch.int64)
    routed_mass = zeros(count, dtype=torch.float64)
    routed = sum(sum(table.known) for table in routing.tables) // len(routing.experts)  # of an expert on average
    step = max(1, routed // (ROUTED_PER_COLUMN * width))
    products = gate_up.new_empty(0, 0)
    rows = 0
    numbered = zip(range(0, len(chunks), every), chunks[::every], strict=True)
    for number, chunk in timed_items("forced pass", numbered):  # the next chunk is prefetched meanwhile
        rows += len(chunk.x)
        if products.shape[1] != len(chunk.x):  # else the memory of the last chunk is used again
            products = gate_up.new_empty(2 * count * width, len(chunk.x))
        with phase("forced pass"):
            torch.mm(gate_up.flatten(0, 1), chunk.x.mT, out=products)
            h = gate(products.view(count, 2 * width, -1))
            good = usable_rows(h, 1) & chunk.usable  # (c, T); in the other rows h is meaningless
        with phase("Hessians"):
            # √w in the dtype of h, so that one operand serves both sides of the sum; and w is its square.
            root = token_roots(chunk, routing.blend, *batch, good, h.dtype)
            mass += root.float().square().sum(1, keepdim=True)
            seen += good.sum(1)
        if source is not None and changes is not None:
            with phase("changes"):
                for part in routing.tables[number].routed(*batch) if number % step == 0 else ():
                    routed_mass += _add_changes(changes, h, good, chunk.x, part, source, gate)
        with phase("Hessians"):
            add_weighed(h, root, total, magnitude)
        del h, good, root  # before there is memory for the next ones
    mass.clamp_(min=torch.finfo(torch.float32).tiny)
    share = routing.blend.share[batch[0] : batch[1]] / routed_mass
    share = torch.where(routed_mass > 0, share, torch.zeros_like(share)).float()
    return DownHessian(
        mirror(total).div_(mass.unsqueeze(-1)),
        magnitude.sum(-1) / mass,
        None if changes is None else changes.mul_(share[:, None, None]),
        seen,
        rows - seen,
    )


def add_weighed(h: torch.Tensor, root: torch.Tensor, total: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Add Σ w h hᵀ to `total` and w |h| to `magnitude`.

    Args:
        h: (c, I, T), overwritten.
        root: √w (c, T), of the same dtype; 0 for rows that are left out, where h may have any value.
        total: (c, I, I) float32, see `symmetric.add_hessian`.
        magnitude: Σ w |h| (c, I, n) float32, in n parts: one, or as many as the kernel `weigh_rows` adds side by side.
    """
    if _by_kernel(h):
        kernels.weigh_rows(h, root, magnitude)
        add_hessian(total, h.mT)
        return
    weigh_rows(h, root)
    add_hessian(total, h.mT)
    magnitude += h.abs_().mul_(root.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32)


def weigh_rows(h: torch.Tensor, root: torch.Tensor) -> None:
    """h *= root, zero where root is; arguments are those of `add_weighed`."""
    left_out = root == 0
    if is_accelerator(h.device) or bool(left_out.any()):
        h.masked_fill_(left_out.unsqueeze(1), 0)
    h.mul_(root.unsqueeze(1))


def _by_kernel(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and use_kernel("weigh_rows", tensor.device)


def _add_changes(
    changes: torch.Tensor,
    h: torch.Tensor,
    good: torch.Tensor,
    x: torch.Tensor,
    routed: Routed,
    source: torch.Tensor,
    gate: Gate,
) -> torch.Tensor:
    """Add Σ r² d hᵀ over rows of a chunk to `changes`; returns their Σ r² (c,) in float64.

    Args:
        h: (c, I, T), from the rounded weights.
        good: (c, T), the rows that are not left out.
        routed: one part of `Table.routed`.
    """
    rows, weight = routed
    wanted = gate(torch.bmm(source, rows_of(x, rows).mT))  # (c, I, m)
    rows = rows.long()
    got = h.gather(2, rows.unsqueeze(1).expand(-1, h.shape[1], -1))
    counted = weight.square() * (usable_rows(wanted, 1) & good.gather(1, rows))
    left_out = (counted == 0).unsqueeze(1)
    d = wanted.sub_(got).mul_(counted.unsqueeze(1).to(h.dtype)).masked_fill_(left_out, 0)
    add_product(changes, d.mT, got.masked_fill_(left_out, 0).mT)
    return counted.double().sum(1)
