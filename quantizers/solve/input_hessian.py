"""Hessians of the inputs of w1 and w3, Σ x xᵀ, from sweeps over the token chunks; and the cache of the next ones.

Legend: T rows of a token chunk, H hidden, c experts of an expert batch, m rows routed to an expert (padded); x (T, H)
is the input.

Hessians are float32 and added token chunk by token chunk, in order, one chunk a matmul. As many as memory has room for
are cached. Where the device's memory is full, the cache is dropped and the step repeated with half as many, see
planning/device_memory.py; an interrupted step leaves no trace: all is computed again from the captured inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from quantizers.device.malloc_tuning import release_free_memory
from quantizers.device.timing import phase
from quantizers.forward.moe_inputs import MoeInputs
from quantizers.planning.device_memory import Residents

from .routing_weights import Blend, Survey, rows_of
from .symmetric import add_hessian, mirror

ExpertBatch = tuple[int, int]  # first and last (exclusive) of its experts, in the order in which they are solved


@dataclass(frozen=True)
class InputHessian:
    """Hessian of x over all usable rows, float32.

    Attributes:
        hessian: Σ x xᵀ (H, H).
        mean: mean |x| (H,).
    """

    hessian: torch.Tensor
    mean: torch.Tensor


def sweep(
    blocks: Sequence[MoeInputs], found: Survey, units: Sequence[ExpertBatch], hidden: int, *, with_all: bool
) -> tuple[InputHessian | None, dict[ExpertBatch, torch.Tensor]]:
    """One pass over all token chunks.

    Args:
        found: see `routing_weights.survey`.
        units: expert batches whose Hessians are wanted; all of them are in memory at a time.
        hidden: H.
        with_all: whether the Hessian of all rows is wanted as well.

    Returns:
        The Hessian of all rows; and of each expert batch Σ r² x xᵀ (c, H, H) over the rows routed to its experts.
    """
    device = found.blended.share.device
    total, size = torch.zeros(hidden, hidden, device=device), torch.zeros(hidden, device=device)
    routed = {unit: torch.zeros(unit[1] - unit[0], hidden, hidden, device=device) for unit in units}
    for block, table in zip(blocks, found.tables, strict=True):
        if with_all:
            add_hessian(total, block.x, block.x)
            size += torch.linalg.vector_norm(block.x, 1, dim=0, dtype=torch.float32)
        for unit, hessian in routed.items():
            for rows, weight in table.routed(*unit):
                _add_routed(hessian, block.x, rows, weight)
    for hessian in routed.values():
        mirror(hessian)
    return InputHessian(mirror(total), size / max(found.blended.tokens, 1)) if with_all else None, routed


def _add_routed(total: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
    """Add Σ r² x xᵀ (c, H, H) over the rows (c, m) of a token chunk that are routed to a batch's experts."""
    picked = rows_of(x, rows).mul_(weight.unsqueeze(-1).to(x.dtype))  # (c, m, H)
    add_hessian(total, picked, picked)


def blended_hessian(routed: torch.Tensor, all_hessian: torch.Tensor, blended: Blend, unit: ExpertBatch) -> torch.Tensor:
    """Blended Σ x xᵀ (c, H, H) of an expert batch, each of total weight 1, in the memory of `routed`.

    Args:
        routed: of the expert batch, see `sweep`.
        all_gram: (H, H), see `InputHessian`.
    """
    of_routed, of_all = blended.factors(*unit)
    return routed.mul_(of_routed[:, None, None]).addcmul_(all_hessian, of_all[:, None, None])


Made = TypeVar("Made")


class HessianCache:
    """Hessians of x of the next expert batches of one layer, as many as there is memory for.

    Args:
        blocks: captured MoE inputs, in token chunks.
        found: see `routing_weights.survey`.
        hidden: H.
        residents: how many expert batches may be cached.
    """

    def __init__(self, blocks: Sequence[MoeInputs], found: Survey, hidden: int, residents: Residents) -> None:
        self.blocks, self.found, self._hidden, self._residents = blocks, found, hidden, residents
        self._routed: dict[ExpertBatch, torch.Tensor] = {}

    def of_all(self, units: Sequence[ExpertBatch]) -> InputHessian:
        """The Hessian of all rows, from a sweep that caches those of the first expert batches as well."""
        inputs = self._sweep(units, with_all=True)
        assert inputs is not None
        return inputs

    def take(self, waiting: Sequence[ExpertBatch]) -> torch.Tensor:
        """The Hessians (c, H, H) of the first of these expert batches, removed from the cache."""
        if waiting[0] not in self._routed:
            release_free_memory()  # otherwise memory that was freed sometimes adds to the peak of what comes next
            self._sweep(waiting, with_all=False)
        return self._routed.pop(waiting[0])

    def _sweep(self, waiting: Sequence[ExpertBatch], *, with_all: bool) -> InputHessian | None:
        def gather() -> InputHessian | None:
            units = waiting[: self._residents.share(len(waiting))]
            inputs, self._routed = sweep(self.blocks, self.found, units, self._hidden, with_all=with_all)
            return inputs

        with phase("sums"):
            return self.within_memory(gather)

    def within_memory(self, work: Callable[[], Made]) -> Made:
        """The result of `work`, repeated with an empty cache of half the size where the device's memory is full.

        Raises:
            QuantizeError: the memory is too small even for one expert batch at a time.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # what `work` made so far is freed only when this block ends
            self._routed = {}
            self._residents.shrink()
            release_free_memory()
