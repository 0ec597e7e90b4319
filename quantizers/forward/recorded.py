"""The recorded input of one layer's MoE block, and the experts to which the router sent each token.

Legend: T tokens of one sequence, H hidden, E experts, K experts chosen per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantizers.architectures.sizes import Sizes

from .states import Rows


@dataclass(frozen=True)
class Recorded:
    """The input and routing of one sequence at a layer's MoE block.

    Attributes:
        x: (T, H), the block's input.
        chosen: (T, K) int64, the experts that the router chose.
        weight: (T, K) float32, their routing weights.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class RecordedRows:
    """The same of all sequences.

    Attributes:
        x, chosen, weight: as in `Recorded`, but chosen is int32.
    """

    x: Rows
    chosen: Rows
    weight: Rows

    def sequences(self, device: torch.device, check: Callable[[], None] = lambda: None) -> Sequence[Recorded]:
        """The sequences as an engine reads them, moved to the device one at a time; `check` is called at each."""
        return _OnDevice(self, device, check)

    def remove(self) -> None:
        """Remove the files, if there are any."""
        for rows in (self.x, self.chosen, self.weight):
            rows.remove()


def recorded_rows(make: Callable[[str, int, torch.dtype], Rows], sizes: Sizes, dtype: torch.dtype) -> RecordedRows:
    """Room for what a layer's experts are called with.

    Args:
        make: from a name, a width and a dtype to rows of all sequences.
        dtype: of the forward pass.
    """
    return RecordedRows(
        make("x", sizes["hidden"], dtype),
        make("chosen", sizes["chosen"], torch.int32),
        make("weight", sizes["chosen"], torch.float32),
    )


class _OnDevice(Sequence[Recorded]):
    def __init__(self, rows: RecordedRows, device: torch.device, check: Callable[[], None]) -> None:
        self.rows, self.device, self.check = rows, device, check

    def __len__(self) -> int:
        return len(self.rows.x)

    def __getitem__(self, index: int) -> Recorded:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.check()
        rows, device = self.rows, self.device
        return Recorded(rows.x[index].to(device), rows.chosen[index].long().to(device), rows.weight[index].to(device))


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: number of tokens routed to each expert, from the chosen experts (T, K)."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )
