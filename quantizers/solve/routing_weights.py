"""Weight of each token for each expert, and the rows that the router sends to each expert.

Every expert sees every token, and routed tokens count more: the blend of docs/explanation/method.md,

    G_e = a_e Σ_routed r² h hᵀ / Σ_routed r²  +  (1 − a_e) Σ_all h hᵀ / n_all

The share a_e of an expert that got too few tokens, or none, is smaller, see under_routed.py.

One product takes as many routed rows of each expert of a batch as the busiest of them has; the others are padded. So
the experts of a batch are chosen by their number of routed tokens, see `expert_batches.by_load`.

Legend: T rows of a token chunk, E experts, c experts of a batch, K experts chosen per token, r routing weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from quantizers.device.prefetch import tensor_to_host
from quantizers.model.moe_inputs import MoeInputs, route_counts
from quantizers.planning.expert_batches import ALIGNED, ROUTED_ROWS, by_load

from .under_routed import shares

ExpertBatch = tuple[int, int]  # first and last (exclusive) of its experts, in the order in which they are solved
Routed = tuple[Tensor, Tensor]  # rows of a chunk (c, m) int32, and their routing weights (c, m) float32


@dataclass(frozen=True)
class Table:
    """The routed rows of one token chunk, expert by expert, without those whose routing weight is zero.

    Attributes:
        rows: (T·K,) int32, row numbers, rising for each expert.
        weight: (T·K,) float32, their routing weights.
        starts, counts: (E,) int64, of each expert in `rows`, in the order in which experts are solved.
        known: the counts on the host, so that a gather of padded rows needs no synchronisation.
    """

    rows: Tensor
    weight: Tensor
    starts: Tensor
    counts: Tensor
    known: list[int]

    def most(self, first: int, last: int) -> int:
        """The largest number of rows of one of these experts, up to a multiple of ALIGNED."""
        return -(-max(self.known[first:last]) // ALIGNED) * ALIGNED

    def routed(self, first: int, last: int) -> Iterator[Routed]:
        """The rows of the experts of a batch, padded to `most`, in parts of ROUTED_ROWS, which bound the memory.

        Where padded, row numbers are arbitrary, and routing weights 0.
        """
        most = self.most(first, last)
        for start in range(0, most, ROUTED_ROWS):
            places = torch.arange(start, min(start + ROUTED_ROWS, most), device=self.rows.device)
            padded = places >= self.counts[first:last, None]
            at = (self.starts[first:last, None] + places).masked_fill_(padded, 0)
            rows, weight = (listed.index_select(0, at.flatten()).view(at.shape) for listed in (self.rows, self.weight))
            yield rows, weight.masked_fill_(padded, 0)


@dataclass(frozen=True)
class RoutingStatistics:
    """Result of one pass over a layer's routing, experts in the order in which they are solved.

    Attributes:
        tables: of each token chunk.
        experts, numbers: their numbers on the host, and (E,) int64.
        routed_tokens: (E,) int64, n_e.
        share: (E,) float32, a_e.
        of_routed, of_all: (E,) float32, the factors of a routed token's r², and of any token, in the blend.
        tokens: number of all usable tokens.
        rows: number of all rows, usable or not.
    """

    tables: list[Table]
    experts: list[int]
    numbers: Tensor
    routed_tokens: Tensor
    share: Tensor
    of_routed: Tensor
    of_all: Tensor
    tokens: int
    rows: int

    def roots(self, chunk: MoeInputs, batch: ExpertBatch, good: Tensor, dtype: torch.dtype) -> Tensor:
        """(c, T): the square root of each row's weight in the blend for a batch's experts, 0 where not `good`."""
        experts = slice(*batch)
        chosen = chunk.chosen == self.numbers[experts, None, None]  # (c, T, K), of which at most one of K is true
        squares = torch.where(chosen, chunk.weight.square(), 0).sum(-1)
        squares.mul_(self.of_routed[experts, None]).add_(self.of_all[experts, None])
        return squares.mul_(good).sqrt_().to(dtype)


def routing_statistics(
    chunks: Iterable[MoeInputs],
    experts: int,
    routed_weight: float,
    full_share_at: int,
    *,
    batch_size: int | None = None,
) -> RoutingStatistics:
    """Count the routed tokens, make each chunk's table, and derive each expert's share; one synchronisation.

    Args:
        routed_weight: the recipe's a, 0 to 1.
        full_share_at: n0, the hidden size, see under_routed.py.
        batch_size: experts of a batch, for the order of `expert_batches.by_load`; None for that of their numbers.
    """
    parts = [(*_of_chunk(chunk, experts), len(chunk.x)) for chunk in chunks]
    assert parts, "a calibration set has at least one sequence"
    rows, weights, counted, squares, lengths = zip(*parts, strict=True)
    numbers, mass = torch.stack(counted), reduce(torch.add, squares)  # (chunks, 2E + 1) and (E,)
    listed, counts = numbers[:, :experts], numbers[:, experts : 2 * experts].sum(0)
    starts = listed.cumsum(1) - listed
    known: list[list[int]] = tensor_to_host(numbers).tolist()
    total = [sum(column) for column in zip(*known, strict=True)]
    order = list(range(experts)) if batch_size is None else by_load(total[experts : 2 * experts], batch_size)
    index = torch.tensor(order).to(counts.device)
    starts, listed, counts, mass = (tensor.index_select(-1, index) for tensor in (starts, listed, counts, mass))
    share = shares(counts, mass, routed_weight, full_share_at)
    known = [[row[expert] for expert in order] for row in known]
    tables = [Table(*of_chunk) for of_chunk in zip(rows, weights, starts, listed, known, strict=True)]
    of_routed = (share / mass.clamp(min=torch.finfo(torch.float64).tiny)).float()
    of_all = (1 - share) / total[-1]
    return RoutingStatistics(tables, order, index, counts, share, of_routed, of_all, total[-1], sum(lengths))


def _of_chunk(chunk: MoeInputs, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One chunk's rows and weights in the order of experts, see `Table`; its counts; its Σ r² of each expert.

    The counts are (2E + 1,) int64: of each expert the rows of the table and all rows that chose it; the usable rows.
    """
    chosen, usable = chunk.chosen.long(), chunk.usable.unsqueeze(-1)
    # Rows that are left out go to an expert after the last. A sort that is stable leaves rows in their order.
    known = torch.where(usable, chosen.clamp(max=experts), experts)
    listed = torch.where(chunk.weight != 0, known, experts).flatten()
    order = listed.argsort(stable=True)
    counted = (route_counts(index, experts + 1)[:experts] for index in (listed, known))
    counts = torch.cat([*counted, chunk.usable.sum().view(1)])
    # scatter_add_, as in route_counts, is for whole numbers only: a GPU adds in the order in which its threads
    # come. A token chooses an expert at most once, so here every number but zeros has an element of its own.
    table = torch.zeros(len(chosen), experts, dtype=torch.float64, device=chosen.device)
    square = chunk.weight.double().square().masked_fill_(chosen >= experts, 0)  # of experts without matrices
    squares = table.scatter_add_(1, chosen.clamp(max=experts - 1), square).sum(0)
    return (order // chosen.shape[1]).int(), chunk.weight.flatten()[order], counts, squares


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (c, m) of x (T, H), (c, m, H)."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, -1)
