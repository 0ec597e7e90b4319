"""How much each token counts for each expert, and where the tokens lie that the router sends to it.

Legend: T rows of one token chunk, E experts, c experts of a batch, K experts chosen per token.

Every expert sees every token (a router sends some experts too few to know their inputs by), and the
tokens the router really sends count more. Of two ways of counting tokens, each of total weight 1,

    G_e = a_e Σ_routed r² h hᵀ / Σ_routed r²  +  (1 − a_e) Σ_all h hᵀ / n_all        (r: routing weight)

is the blend, with a_e = a · min(1, n_e / n0): an expert with few routed tokens leans on all of them.
Because routing is known before the experts run, the blend is one weighted sum: nothing else is kept.

One product takes as many routed rows of each expert of a batch as the busiest of them has; the others are padded. So
which experts form a batch follows from their routed tokens, see `expert_batches.by_load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from quantizers.device.prefetch import tensor_to_host
from quantizers.forward.moe_inputs import MoeInputs, route_counts, routing_of
from quantizers.planning.expert_batches import ALIGNED, ROUTED_ROWS, by_load

Routed = tuple[torch.Tensor, torch.Tensor]  # rows of a block (c, m) int32, and their routing weights (c, m) float32


@dataclass(frozen=True)
class Blend:
    """How the tokens are weighted for each expert, in the order in which they are solved.

    Attributes:
        experts: (E,) int64, their numbers.
        routed_tokens: (E,) int64, n_e.
        routed_mass: (E,) float64, Σ_routed r².
        share: (E,) float32, a_e.
        tokens: number of all usable tokens.
        full_share_at: n0, the number of routed tokens from which an expert gets the full share a.
    """

    experts: torch.Tensor
    routed_tokens: torch.Tensor
    routed_mass: torch.Tensor
    share: torch.Tensor
    tokens: int
    full_share_at: int

    def factors(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(c,) float32 each: what r² of a routed token, and what any token, is multiplied by in the blend."""
        routed, every = self._factors
        return routed[first:last], every[first:last]

    @cached_property
    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        mass = self.routed_mass.clamp(min=torch.finfo(torch.float64).tiny)
        return (self.share / mass).float(), (1 - self.share) / self.tokens


@dataclass(frozen=True)
class Table:
    """The routed rows of one block, expert by expert; rows whose routing weight is zero are left out.

    Attributes:
        rows: (T·K,) int32, numbers of rows; those of an expert begin at its start, in their order.
        weight: (T·K,) float32, their routing weights.
        starts, counts: (E,) int64, in the order in which experts are solved.
        known: the counts on the host, so that a gather of padded rows needs no synchronisation.
    """

    rows: torch.Tensor
    weight: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    known: list[int]

    def most(self, first: int, last: int) -> int:
        """The largest number of rows that one of these experts gets, up to a multiple of ALIGNED."""
        return -(-max(self.known[first:last]) // ALIGNED) * ALIGNED

    def routed(self, first: int, last: int) -> Iterator[Routed]:
        """The rows of the experts of a batch, padded to `most`.

        They come in parts of ROUTED_ROWS, usually one: memory does not grow where a router prefers some experts.

        Yields:
            Row numbers (c, m) int32, any row's where padded, and routing weights (c, m) float32, 0 there.
        """
        most = self.most(first, last)
        for start in range(0, most, ROUTED_ROWS):
            places = torch.arange(start, min(start + ROUTED_ROWS, most), device=self.rows.device)
            padded = places >= self.counts[first:last, None]
            at = (self.starts[first:last, None] + places).masked_fill_(padded, 0)
            rows, weight = (listed.index_select(0, at.flatten()).view(at.shape) for listed in (self.rows, self.weight))
            yield rows, weight.masked_fill_(padded, 0)


@dataclass(frozen=True)
class Survey:
    """What one sweep over a layer's routing finds.

    Attributes:
        tables: of each block.
        blended: how tokens count.
        experts: their numbers, in the order in which they are solved; as in `Blend`, but on the host.
        rows: number of all rows, usable or not.
    """

    tables: list[Table]
    blended: Blend
    experts: list[int]
    rows: int

    def routed(self) -> int:
        """Tokens that an expert gets on average."""
        return sum(sum(table.known) for table in self.tables) // len(self.blended.share)


def survey(
    blocks: Iterable[MoeInputs],
    experts: int,
    routed_weight: float,
    full_share_at: int,
    *,
    unit: int | None = None,
) -> Survey:
    """Count the routed tokens, make each block's table, and derive each expert's share; one synchronisation.

    Args:
        experts: E.
        routed_weight: the recipe's a, 0 to 1.
        full_share_at: n0. The hidden size is used: with fewer tokens than columns the routed Hessian is
            singular.
        unit: experts of a batch, to solve them in the order of `expert_batches.by_load`; None for that of their
            numbers.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    numbers: list[torch.Tensor] = []
    mass: torch.Tensor | None = None
    rows = 0
    for block in routing_of(blocks):
        order, weight, counts, squares = _of_block(block, experts)
        parts.append((order, weight))
        numbers.append(counts)
        mass = squares if mass is None else mass + squares
        rows += len(block.x)
    assert mass is not None, "a calibration set has at least one sequence"
    together = torch.stack(numbers)  # (blocks, 2E + 1)
    listed, counts = together[:, :experts], together[:, experts : 2 * experts].sum(0)
    starts = listed.cumsum(1) - listed
    found: list[list[int]] = tensor_to_host(together).tolist()
    total = [sum(column) for column in zip(*found, strict=True)]
    known_order = list(range(experts)) if unit is None else by_load(total[experts : 2 * experts], unit)
    order = torch.tensor(known_order).to(counts.device)
    starts, listed, counts, mass = (each.index_select(-1, order) for each in (starts, listed, counts, mass))
    share = routed_weight * torch.clamp(counts / full_share_at, max=1.0)
    share = torch.where(mass > torch.finfo(torch.float32).tiny, share, torch.zeros_like(share)).float()
    tables = [
        Table(*part, start, count, [row[expert] for expert in known_order])
        for part, start, count, row in zip(parts, starts, listed, found, strict=True)
    ]
    return Survey(tables, Blend(order, counts, mass, share, total[-1], full_share_at), known_order, rows)


def _of_block(block: MoeInputs, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One block's rows and weights in the order of experts, see `Table`; its numbers; its Σ r² of each expert.

    The numbers are (2E + 1,) int64: of each expert the rows that count and all rows that chose it, and the usable rows.
    """
    chosen, usable = block.chosen.long(), block.usable.unsqueeze(-1)
    # Whatever is left out goes to an expert after the last. A sort that is stable leaves rows in their order.
    known = torch.where(usable, chosen, experts)
    listed = torch.where(block.weight != 0, known, experts).flatten()
    order = listed.argsort(stable=True)
    counted = (route_counts(index, experts + 1)[:experts] for index in (listed, known))
    counts = torch.cat([*counted, block.usable.sum().view(1)])
    # scatter_add_, as in route_counts, is for whole numbers only: a GPU adds in the order in which its threads
    # come. A token chooses an expert at most once, so here every number has a place of its own.
    table = torch.zeros(len(chosen), experts, dtype=torch.float64, device=chosen.device)
    squares = table.scatter_(1, chosen, block.weight.double().square()).sum(0)
    return (order // chosen.shape[1]).int(), block.weight.flatten()[order], counts, squares


def rows_of(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows (c, m) of x (T, H), (c, m, H)."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, -1)


def squared_weights(block: MoeInputs, experts: torch.Tensor) -> torch.Tensor:
    """(c, T) float32: the square of each row's routing weight for some experts (c,), 0 where not chosen."""
    own = block.chosen == experts[:, None, None]  # (c, T, K), of which at most one of K is true
    return torch.where(own, block.weight.square(), 0).sum(-1)


def token_roots(
    block: MoeInputs, blended: Blend, first: int, last: int, good: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(c, T): the root of what each row counts for the experts of a batch.

    Args:
        good: (c, T) bool, rows that count at all.
        dtype: of the result.
    """
    routed, every = blended.factors(first, last)
    experts = blended.experts[first:last]
    weights = squared_weights(block, experts).mul_(routed.unsqueeze(-1)).add_(every.unsqueeze(-1))
    return weights.mul_(good).sqrt_().to(dtype)
