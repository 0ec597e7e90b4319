"""Hessians of the inputs of w1 and w3, Σ x xᵀ, from sweeps over the token chunks; and the cache of the next ones.

Legend: T rows of a token chunk, H hidden, c experts of an expert batch, m rows routed to an expert (padded); x (T, H)
is the input.

Hessians are float32 and added token chunk by token chunk, in order, one chunk a matmul. As many as memory has room for
are cached. Where the device's memory is full, the cache is dropped and the step repeated from the captured inputs with
half as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from quantizers.device.devices import release_free_memory
from quantizers.device.timing import phase
from quantizers.model.moe_inputs import MoeInputs
from quantizers.planning.device_memory import Residents

from .routing_weights import Blend, RoutingStatistics, rows_of
from .symmetric import add_hessian, mirror

ExpertBatch = tuple[int, int]  # first and last (exclusive) of its experts, in the order in which they are solved
Result = TypeVar("Result")


@dataclass(frozen=True)
class InputHessian:
    """Hessian Σ x xᵀ (H, H) of all usable rows and mean |x| (H,), float32."""

    hessian: torch.Tensor
    mean: torch.Tensor


def sweep(
    chunks: Sequence[MoeInputs],
    routing: RoutingStatistics,
    batches: Sequence[ExpertBatch],
    hidden: int,
    *,
    with_all: bool,
) -> tuple[InputHessian, dict[ExpertBatch, torch.Tensor]]:
    """One pass over all token chunks for the Hessians of some expert batches, which are in memory together.

    Returns:
        The Hessian of all rows, zero without `with_all`; of each expert batch Σ r² x xᵀ (c, H, H) over its routed rows.
    """
    device = routing.blend.share.device
    total, size = torch.zeros(hidden, hidden, device=device), torch.zeros(hidden, device=device)
    hessians = {batch: torch.zeros(batch[1] - batch[0], hidden, hidden, device=device) for batch in batches}
    for chunk, table in zip(chunks, routing.tables, strict=True):
        if with_all:
            add_hessian(total, chunk.x)
            size += torch.linalg.vector_norm(chunk.x, 1, dim=0, dtype=torch.float32)
        for batch, hessian in hessians.items():
            for rows, weight in table.routed(*batch):
                picked = rows_of(chunk.x, rows).mul_(weight.unsqueeze(-1).to(chunk.x.dtype))  # (c, m, H)
                add_hessian(hessian, picked)
    for hessian in hessians.values():
        mirror(hessian)
    return InputHessian(mirror(total), size / max(routing.blend.tokens, 1)), hessians


def blended_hessian(routed: torch.Tensor, all_hessian: torch.Tensor, blend: Blend, batch: ExpertBatch) -> torch.Tensor:
    """Blended Σ x xᵀ (c, H, H) of an expert batch, each of total weight 1, in `routed`'s memory; all_hessian (H, H)."""
    of_routed, of_all = blend.factors(*batch)
    return routed.mul_(of_routed[:, None, None]).addcmul_(all_hessian, of_all[:, None, None])


class HessianCache:
    """Hessians of x of the next expert batches of one layer, as many as there is memory for."""

    def __init__(
        self, chunks: Sequence[MoeInputs], routing: RoutingStatistics, hidden: int, residents: Residents
    ) -> None:
        self.chunks, self.routing, self._hidden, self._residents = chunks, routing, hidden, residents
        self._cached: dict[ExpertBatch, torch.Tensor] = {}

    def of_all(self, batches: Sequence[ExpertBatch]) -> InputHessian:
        """The Hessian of all rows, from a sweep that caches those of the first expert batches as well."""
        return self._sweep(batches, with_all=True)

    def take(self, waiting: Sequence[ExpertBatch]) -> torch.Tensor:
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

        Raises:
            QuantizeError: the memory is too small even for one expert batch at a time.
        """
        while True:
            try:
                return step()
            except torch.OutOfMemoryError:
                pass  # the step's tensors are freed only when this block ends
            self._cached = {}
            self._residents.shrink()
            release_free_memory()
