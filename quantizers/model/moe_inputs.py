"""Captured inputs of one layer's MoE block, and the experts to which the router sent each token.

Legend: T rows (tokens), H hidden, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from quantizers.architectures.sizes import Sizes
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import prefetched
from quantizers.distributed.process_group import ProcessGroup

from .activation_store import ActivationStore

LARGEST = 1e16  # squares of this, times ten million tokens, are still finite in float32


@dataclass(frozen=True)
class MoeInputs:
    """The input and routing of some rows at a layer's MoE block, as `capture_moe_inputs` makes it.

    Attributes:
        x: (T, H), the block's input; zeros in rows that are not usable.
        chosen: (T, K) int32 or int64, the experts that the router chose.
        weight: (T, K) float32, their routing weights; zeros in rows that are not usable.
        usable: (T,) bool; False where the input or a routing weight is not finite, or so large that its square is not.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor
    usable: torch.Tensor

    def of_sequences(self, lengths: Sequence[int]) -> MoeInputs:
        """Of the rows (B · T, …) of a padded batch those that belong to its sequences."""
        kept = torch.cat([torch.arange(length) + i * max(lengths) for i, length in enumerate(lengths)])
        return MoeInputs(*(getattr(self, field.name)[kept.to(self.x.device)] for field in fields(self)))


def capture_moe_inputs(x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> MoeInputs:
    """The routing of x (T, H), with zeros in rows that no Hessian can use; the arguments are left as they are.

    They are validated once, here, and not in each pass over them.
    """
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


@dataclass(frozen=True)
class MoeInputStore:
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
        for stored, field in zip(self._parts(rows), fields(captured), strict=True):
            stored.copy_(getattr(captured, field.name).view_as(stored))

    def complete(self, dist: ProcessGroup, rows_of: Callable[[int], tuple[int, int]]) -> None:
        """Get the rows that the other processes have captured.

        Args:
            rows_of: first and last (exclusive) row that a rank has captured, in the order of ranks.
        """
        if not dist.is_distributed:
            return
        for src in range(dist.world_size):
            for part in self._parts(slice(*rows_of(src))):
                dist.broadcast(part, src)

    def at(self, rows: slice, device: torch.device) -> MoeInputs:
        """These rows on a device: views if they are there already."""
        return _moe_inputs(tensor.to(device) for tensor in self._parts(rows))

    def _parts(self, rows: slice) -> tuple[torch.Tensor, ...]:
        return tuple(part.flat[rows] for part in (self.x, self.chosen, self.weight, self.usable))

    def sequence(self, number: int) -> slice:
        """The rows of one sequence."""
        return slice(self.x.partition.offsets[number], self.x.partition.offsets[number + 1])

    def chunks(
        self, device: torch.device, length: int, check: Callable[[], None] = lambda: None
    ) -> Sequence[MoeInputs]:
        """All rows in their order, `length` at a time, on the device.

        Each is valid until the next one is asked for, which is copied meanwhile, see `prefetched`.

        Args:
            check: called before each.
        """
        rows = [slice(start, start + length) for start in range(0, len(self.x.flat), length)]
        return _Chunks(self, rows, device, check)

    def remove(self) -> None:
        """Remove the files, if there are any."""
        for rows in (self.x, self.chosen, self.weight, self.usable):
            rows.remove()


def moe_input_store(
    make: Callable[[str, int, torch.dtype], ActivationStore], sizes: Sizes, dtype: torch.dtype
) -> MoeInputStore:
    """Room for what a layer's experts are called with.

    Args:
        make: from a name, a width and a dtype to rows of all sequences.
        dtype: of the forward pass.
    """
    return MoeInputStore(
        make("x", sizes["hidden"], dtype),
        make("chosen", sizes["chosen"], torch.int32),
        make("weight", sizes["chosen"], torch.float32),
        make("usable", 1, torch.bool),
    )


@dataclass(frozen=True)
class _Chunks(Sequence[MoeInputs]):
    rows: MoeInputStore
    slices: Sequence[slice]
    device: torch.device
    check: Callable[[], None]

    def __len__(self) -> int:
        return len(self.slices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Chunks(self.rows, self.slices[index], self.device, self.check)
        self.check()
        return self.rows.at(self.slices[index], self.device)

    def __iter__(self) -> Iterator[MoeInputs]:
        for part in prefetched([self.rows._parts(rows) for rows in self.slices], self.device):
            self.check()
            yield _moe_inputs(part)


def _moe_inputs(part: Iterable[torch.Tensor]) -> MoeInputs:
    x, chosen, weight, usable = part
    return MoeInputs(x, chosen, weight, usable.squeeze(-1))


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: number of tokens routed to each expert, from the chosen experts (T, K) int64."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )
