"""Hessians of the inputs of w1 and w3, Σ x xᵀ, and of w2, Σ h hᵀ.

Hessians are float32 and added token chunk by token chunk, in order, one chunk a matmul: torch does not promise the same
bits for other shapes. Those of x come from sweeps over all chunks, for as many expert batches as memory has room for;
those of h from a forced pass: every token through every expert of an expert batch.

Legend: T rows of a token chunk, H hidden, I expert width, c experts of an expert batch, m rows routed to an expert
(padded); x (T, H) is what w1 and w3 read, h (T, I) what w2 reads: the gate of x w1ᵀ and x w3ᵀ, see gates.py. h is
transposed, (c, I, T): one matmul then gives it for all experts of the batch, and each half of the result is contiguous.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from quantizers.architectures.gates import Gate
from quantizers.device.devices import is_accelerator, release_free_memory
from quantizers.device.timing import phase, timed_items
from quantizers.device.triton_support import use_kernel
from quantizers.model.moe_inputs import MoeInputs, usable_rows
from quantizers.planning.device_memory import Residents

from . import kernels
from .routing_weights import ExpertBatch, Routed, RoutingStatistics, rows_of
from .symmetric import add_hessian, add_product, mirror

ROUTED_PER_COLUMN = 32  # routed tokens for each column of w2: with more, only every n-th chunk goes into `changes`
Result = TypeVar("Result")


@dataclass(frozen=True)
class InputHessian:
    """Hessian Σ x xᵀ (H, H) of all usable rows, and mean and largest |x| (H,), float32."""

    hessian: Tensor
    mean: Tensor
    largest: Tensor


def sweep(
    chunks: Sequence[MoeInputs],
    routing: RoutingStatistics,
    batches: Sequence[ExpertBatch],
    hidden: int,
    *,
    with_all: bool,
) -> tuple[InputHessian, dict[ExpertBatch, Tensor]]:
    """One pass over all token chunks for the Hessians of some expert batches, which are in memory together.

    Of each expert batch Σ r² x xᵀ (c, H, H) over its routed rows; the Hessian of all rows is zero without `with_all`.
    """
    zeros = partial(torch.zeros, device=routing.share.device)
    total = zeros(hidden, hidden)
    size = zeros(hidden)
    largest = zeros(hidden)
    hessians = {(first, last): zeros(last - first, hidden, hidden) for first, last in batches}
    for chunk, table in zip(chunks, routing.tables, strict=True):
        if with_all:
            add_hessian(total, chunk.x)
            size += torch.linalg.vector_norm(chunk.x, 1, dim=0, dtype=torch.float32)
            largest = torch.maximum(largest, torch.linalg.vector_norm(chunk.x, torch.inf, dim=0, dtype=torch.float32))
        for batch, hessian in hessians.items():
            for rows, weight in table.routed(*batch):
                add_hessian(hessian, rows_of(chunk.x, rows).mul_(weight.unsqueeze(-1).to(chunk.x.dtype)))  # (c, m, H)
    for hessian in hessians.values():
        mirror(hessian)
    return InputHessian(mirror(total), size / max(routing.tokens, 1), largest), hessians


def blended_hessian(routed: Tensor, all_hessian: Tensor, routing: RoutingStatistics, batch: ExpertBatch) -> Tensor:
    """Blended Σ x xᵀ (c, H, H) of an expert batch, each of total weight 1, in `routed`'s memory; all_hessian (H, H)."""
    of_routed, of_all = (factors[slice(*batch), None, None] for factors in (routing.of_routed, routing.of_all))
    return routed.mul_(of_routed).addcmul_(all_hessian, of_all)


class HessianCache:
    """Hessians of x of one layer: `of_all` rows, and of the next expert batches, as many as there is memory for.

    The first sweep gives that of all rows, and caches those of the first expert batches as well.
    """

    def __init__(
        self,
        chunks: Sequence[MoeInputs],
        routing: RoutingStatistics,
        hidden: int,
        residents: Residents,
        batches: Sequence[ExpertBatch],
    ) -> None:
        self.chunks = chunks
        self.routing = routing
        self._hidden = hidden
        self._residents = residents
        self._cached: dict[ExpertBatch, Tensor] = {}
        self.of_all = self._sweep(batches, with_all=True)

    def take(self, waiting: Sequence[ExpertBatch]) -> Tensor:
        """The Hessians (c, H, H) of the first of these expert batches, removed from the cache."""
        if waiting[0] not in self._cached:
            release_free_memory()  # otherwise memory that was freed sometimes adds to the peak of what comes next
            self._sweep(waiting, with_all=False)
        return self._cached.pop(waiting[0])

    def _sweep(self, waiting: Sequence[ExpertBatch], *, with_all: bool) -> InputHessian:
        def compute() -> InputHessian:
            batches = waiting[: self._residents.share(len(waiting))]
            inputs, self._cached = sweep(self.chunks, self.routing, batches, self._hidden, with_all=with_all)
            return inputs

        with phase("Hessians"):
            return self.within_memory(compute)

    def within_memory(self, step: Callable[[], Result]) -> Result:
        """The result of a step, repeated with an empty cache of half the size where the device's memory is full.

        A QuantizeError says that it is too small even for one expert batch at a time.
        """
        while True:
            with contextlib.suppress(torch.OutOfMemoryError):  # the step's tensors are freed when this block ends
                return step()
            self._cached = {}
            self._residents.shrink()
            release_free_memory()


@dataclass(frozen=True)
class DownHessian:
    """Blended Hessians of h for the experts of a batch, each of total weight 1, in float32.

    Attributes:
        hessian: Σ h hᵀ (c, I, I).
        mean: of |h|, (c, I).
        changes: Σ d hᵀ (c, I, I), where h + d is the source's; over routed tokens only, weighted as in the blend. None
            unless asked for.
        seen, dropped: (c,) int64, rows of h that went into the Hessian, and rows left out: not usable themselves, or in
            the layer's input.
        largest: |h| of all rows that are not left out, (c, I). None unless asked for.
    """

    hessian: Tensor
    mean: Tensor
    changes: Tensor | None
    seen: Tensor
    dropped: Tensor
    largest: Tensor | None = None


def collect_down_hessian(
    chunks: Sequence[MoeInputs],
    routing: RoutingStatistics,
    gate_up: Tensor,
    *,
    gate: Gate,
    batch: ExpertBatch,
    bias: Tensor | None = None,
    source: Tensor | None = None,
    every: int = 1,
    with_largest: bool = False,
) -> DownHessian:
    """Hessians of an expert batch, from every token through every expert of it.

    Args:
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x; rounded or not. Or w3 alone, see gates.py.
        source: of the same shape and dtype: the weights that `gate_up` was rounded from, for `changes`.
        bias: (c, 2I), added to the products; None for nothing.
        every: read every n-th token chunk only.
        with_largest: whether `largest` is asked for.
    """
    count = len(gate_up)
    width = gate(gate_up.new_zeros(1, gate_up.shape[1], 1)).shape[1]  # of h
    zeros = partial(torch.zeros, device=gate_up.device)
    # Sums over token chunks, which are divided by the mass of all rows at the end.
    total, changes = zeros(count, width, width), None if source is None else zeros(count, width, width)
    by_kernel = gate_up.dtype == torch.bfloat16 and use_kernel("weigh_rows", gate_up.device)
    magnitude = zeros(count, width, kernels.SUMS if by_kernel else 1)  # in so many parts, added side by side
    mass, seen = zeros(count, 1), zeros(count, dtype=torch.int64)
    largest = zeros(count, width) if with_largest else None
    routed_mass = zeros(count, dtype=torch.float64)
    routed = sum(sum(table.known) for table in routing.tables) // len(routing.experts)  # of an expert on average
    step = max(1, routed // (ROUTED_PER_COLUMN * width))
    products, rows = gate_up.new_empty(0, 0), 0
    numbered = zip(range(0, len(chunks), every), chunks[::every], strict=True)
    for number, chunk in timed_items("forced pass", numbered):  # the next chunk is prefetched meanwhile
        rows += len(chunk.x)
        if products.shape[1] != len(chunk.x):  # else the memory of the last chunk is used again
            products = gate_up.new_empty(count * gate_up.shape[1], len(chunk.x))
        with phase("forced pass"):
            torch.mm(gate_up.flatten(0, 1), chunk.x.mT, out=products)
            if bias is not None:
                products.view(count, gate_up.shape[1], -1).add_(bias.unsqueeze(-1))
            h = gate(products.view(count, gate_up.shape[1], -1))
            good = usable_rows(h, 1) & chunk.usable  # (c, T); in the other rows h is meaningless
        with phase("Hessians"):
            # √w in the dtype of h, so that one operand serves both sides of the sum; and w is its square.
            root = routing.roots(chunk, batch, good, h.dtype)
            mass += root.float().square().sum(1, keepdim=True)
            seen += good.sum(1)
            if largest is not None:
                peaks = torch.linalg.vector_norm(h.masked_fill(~good.unsqueeze(1), 0), torch.inf, dim=-1)
                largest = torch.maximum(largest, peaks.float())
        if source is not None and changes is not None:
            with phase("changes"):
                for gathered in routing.tables[number].routed(*batch) if number % step == 0 else ():
                    wanted = torch.bmm(source, rows_of(chunk.x, gathered[0]).mT)
                    wanted = gate(wanted if bias is None else wanted.add_(bias.unsqueeze(-1)))  # (c, I, m)
                    routed_mass += _add_changes(changes, h, good, wanted, gathered)
                    del wanted
        with phase("Hessians"):
            if by_kernel:
                kernels.weigh_rows(h, root, magnitude)
            else:
                weigh_rows(h, root)
            add_hessian(total, h.mT)
            if not by_kernel:
                magnitude += h.abs_().mul_(root.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32)
        del h, good, root  # before there is memory for the next ones
    mass.clamp_(min=torch.finfo(torch.float32).tiny)
    if changes is not None:
        share = routing.share[slice(*batch)] / routed_mass
        changes.mul_(torch.where(routed_mass > 0, share, torch.zeros_like(share)).float()[:, None, None])
    hessian = mirror(total).div_(mass.unsqueeze(-1))
    return DownHessian(hessian, magnitude.sum(-1) / mass, changes, seen, rows - seen, largest)


def weigh_rows(h: Tensor, root: Tensor) -> None:
    """h (c, I, T) *= root (c, T), zero where root is: there h may have any value. The twin of `kernels.weigh_rows`."""
    left_out = root == 0
    if is_accelerator(h.device) or bool(left_out.any()):
        h.masked_fill_(left_out.unsqueeze(1), 0)
    h.mul_(root.unsqueeze(1))


def _add_changes(changes: Tensor, h: Tensor, good: Tensor, wanted: Tensor, routed: Routed) -> Tensor:
    """Add Σ r² d hᵀ over one part of a chunk's routed rows to `changes`; returns their Σ r² (c,) in float64.

    h (c, I, T) is from the rounded weights, and `wanted` (c, I, m), of these rows alone, from the source's; it is
    overwritten. `good` (c, T) are the rows that are not left out.
    """
    rows, weight = routed[0].long(), routed[1]
    got = h.gather(2, rows.unsqueeze(1).expand(-1, h.shape[1], -1))
    counted = weight.square() * (usable_rows(wanted, 1) & good.gather(1, rows))
    left_out = (counted == 0).unsqueeze(1)
    d = wanted.sub_(got).mul_(counted.unsqueeze(1).to(h.dtype)).masked_fill_(left_out, 0)
    add_product(changes, d.mT, got.masked_fill_(left_out, 0).mT)
    return counted.double().sum(1)
