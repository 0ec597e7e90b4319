"""Captured inputs of one layer's MoE block, and the experts to which the router sent each token.

Legend: T rows (tokens), H hidden, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import prefetched

from .activation_store import ActivationStore

LARGEST = 1e16  # squares of this, times ten million tokens, are still finite in float32


class MoeInputs(NamedTuple):
    """The input and routing of some rows at a layer's MoE block, as `capture_moe_inputs` makes it.

    Attributes:
        x: (T, H), what the experts read: the block's input for the most part.
        chosen: (T, K) int32 or int64, the experts that the router chose; from E on they have no matrices.
        weight: (T, K) float32, their routing weights.
        usable: (T,) bool; False where the input or a routing weight is not finite, or so large that its square is not:
            both are zero there.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    usable: torch.Tensor

    def of_sequences(self, lengths: Sequence[int]) -> MoeInputs:
        """Select the rows that belong to the sequences of a padded batch, of its rows (B · T, …)."""
        kept = torch.cat([torch.arange(length) + i * max(lengths) for i, length in enumerate(lengths)])
        return MoeInputs._make(rows[kept.to(self.x.device)] for rows in self)


def capture_moe_inputs(x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> MoeInputs:
    """The routing of x (T, H), with zeros in rows that no Hessian can use: validated once, not in each pass."""
    weight = weight.float()
    usable = usable_rows(x) & usable_rows(weight)
    # A check first is quicker on a CPU; on a GPU it would be a synchronisation.
    if is_accelerator(x.device) or not bool(usable.all()):
        unusable = ~usable.unsqueeze(-1)
        x, weight = x.masked_fill(unusable, 0), weight.masked_fill(unusable, 0)
    return MoeInputs(x, chosen, weight, usable)


def usable_rows(rows: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """(…) bool: where the values of (…, C) along `dim` are finite, and their squares can be added up in float32."""
    return (rows.amax(dim) < LARGEST) & (rows.amin(dim) > -LARGEST)  # False for NaN and infinity; no |rows| in between


class MoeInputStore(NamedTuple):
    """Captured inputs of all sequences; every process has all rows, since the solver reads them many times.

    Attributes:
        x, chosen, weight, usable: as in `MoeInputs`, but chosen is int32, and usable has one column.
    """

    x: ActivationStore
    chosen: ActivationStore
    weight: ActivationStore
    usable: ActivationStore

    def put(self, rows: slice, captured: MoeInputs) -> None:
        """Store the inputs of these rows, counted through all sequences."""
        for stored, tensor in zip(self.at(rows), captured, strict=True):
            stored.copy_(tensor.view_as(stored))

    def complete(self, states: ActivationStore) -> None:
        """Get the rows that the other processes have captured: each those of `states` that it computes."""
        for src in range(states.dist.world_size):
            for rows in self.at(slice(*states.rows_of(src))):
                states.dist.broadcast(rows, src)

    def at(self, rows: slice) -> tuple[torch.Tensor, ...]:
        """Views of these rows, of each of the four."""
        return tuple(store.flat[rows] for store in self)

    def chunks(self, device: torch.device, length: int, check: Callable[[], None] = lambda: None) -> _Chunks:
        """All rows in their order, `length` at a time, on the device.

        Each is valid until the next one is asked for, which is copied meanwhile, see `prefetched`; `check` is called
        before each.
        """
        starts = range(0, len(self.x.flat), length)
        return _Chunks([self.at(slice(start, start + length)) for start in starts], device, check)

    def remove(self) -> None:
        """Remove the files, if there are any."""
        for store in self:
            store.remove()


def moe_input_store(
    make: Callable[[str, int, torch.dtype], ActivationStore], facts: Architecture, dtype: torch.dtype
) -> MoeInputStore:
    """Allocate a store for the inputs of a layer's experts, in the dtype of the forward pass.

    `make` gets a name, a width and a dtype, and returns a store for the rows of all sequences.
    """
    return MoeInputStore(
        make("x", facts.expert_inputs, dtype),
        make("chosen", facts.top_k, torch.int32),
        make("weight", facts.top_k, torch.float32),
        make("usable", 1, torch.bool),
    )


@dataclass(frozen=True)
class _Chunks(Sequence[MoeInputs]):
    parts: Sequence[tuple[torch.Tensor, ...]]
    device: torch.device
    check: Callable[[], None]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Chunks(self.parts[index], self.device, self.check)
        return next(iter(_Chunks([self.parts[index]], self.device, self.check)))

    def __iter__(self) -> Iterator[MoeInputs]:
        for x, chosen, weight, usable in prefetched(self.parts, self.device):
            self.check()
            yield MoeInputs(x, chosen, weight, usable.squeeze(-1))


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: number of tokens routed to each expert, from the chosen experts (T, K) int64.

    Larger numbers are those of experts without matrices, which are not counted.
    """
    flat = chosen.flatten().clamp(max=experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:experts]
