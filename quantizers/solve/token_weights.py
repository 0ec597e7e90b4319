"""How much each token counts for each expert.

Legend: T tokens of one sequence, H hidden, E experts, c experts of a chunk, K experts chosen per token;
x (T, H) is what the MoE block reads.

Every expert sees every token (a router sends some experts too few to know their inputs by), and the
tokens the router really sends count more. Of two ways of counting tokens, each of total weight 1,

    G_e = a_e Σ_routed r² h hᵀ / Σ_routed r²  +  (1 − a_e) Σ_all h hᵀ / n_all        (r: routing weight)

is the blend, with a_e = a · min(1, n_e / n0): an expert with few routed tokens leans on all of them.
Because routing is known before the experts run, the blend is one weighted sum: nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from quantizers.forward.recorded import Recorded, route_counts
from quantizers.plan.solve_memory import BATCH_TOKENS

from .symmetric import gram

LARGEST = 1e16  # squares of this, times ten million tokens, are still finite in float32


@dataclass(frozen=True)
class Blend:
    """How the tokens are weighted for each expert.

    Attributes:
        routed_tokens: (E,) int64, n_e.
        routed_mass: (E,) float64, Σ_routed r².
        share: (E,) float32, a_e.
        tokens: number of all usable tokens.
        full_share_at: n0, the number of routed tokens from which an expert gets the full share a.
    """

    routed_tokens: torch.Tensor
    routed_mass: torch.Tensor
    share: torch.Tensor
    tokens: int
    full_share_at: int


@dataclass(frozen=True)
class InputSums:
    """Sums of x over all tokens, float32.

    Attributes:
        gram: Σ x xᵀ (H, H).
        mean: mean |x| (H,).
        tokens: rows that went into the sums.
        dropped: rows left out because they were not finite, or so large that their squares are not.
    """

    gram: torch.Tensor
    mean: torch.Tensor
    tokens: int
    dropped: int

    def fallbacks(self) -> list[str]:
        """A line for the report where rows were left out."""
        return [f"{self.dropped} rows of the block's input left out: not finite, or too large"] if self.dropped else []


def usable(rows: torch.Tensor) -> torch.Tensor:
    """(…, T) bool: the rows of (…, T, C) whose squares can be added up in float32."""
    return rows.abs().amax(-1) < LARGEST  # False for NaN and infinity


def blank(rows: torch.Tensor, good: torch.Tensor) -> torch.Tensor:
    """Set the rows of (…, T, C) that are not `good` (…, T) to zero, in place."""
    # To look first is quicker where looking is free; a GPU would have to be waited for.
    if rows.is_cuda or not bool(good.all()):
        rows.masked_fill_(~good.unsqueeze(-1), 0)
    return rows


def input_sums(sequences: Iterable[Recorded]) -> InputSums:
    """Gather `InputSums`, one sequence a matmul, in order."""
    total: torch.Tensor | None = None
    size = count = torch.zeros(0)
    rows = 0
    for sequence in sequences:
        good = usable(sequence.x)
        x = torch.where(good.unsqueeze(-1), sequence.x, torch.zeros_like(sequence.x))
        part, magnitude = gram(x, x), x.float().abs().sum(0)
        rows += x.shape[0]
        if total is None:
            total, size, count = part, magnitude, good.sum()
        else:
            total, size, count = total.add_(part), size.add_(magnitude), count + good.sum()
    assert total is not None, "a calibration set has at least one sequence"
    tokens = int(count)
    return InputSums(total, size / max(tokens, 1), tokens, rows - tokens)


def blend(sequences: Iterable[Recorded], experts: int, routed_weight: float, full_share_at: int) -> Blend:
    """Count the routed tokens, rows that are not `usable` left out, and derive each expert's share.

    Args:
        routed_weight: the recipe's a, 0 to 1.
        full_share_at: n0. The hidden size is used: with fewer tokens than columns the routed Gram
            matrix is singular.
    """
    counts: torch.Tensor | None = None
    mass = torch.zeros(0)
    tokens = torch.zeros(0)
    for sequence in sequences:
        good = usable(sequence.x)
        kept = good.unsqueeze(-1).expand_as(sequence.chosen)
        part = torch.zeros(experts, dtype=torch.int64, device=kept.device).scatter_add_(
            0, sequence.chosen.flatten(), kept.flatten().long()
        )
        # scatter_add_, as above, is for whole numbers only: a GPU adds in the order in which its threads come. A token
        # chooses an expert at most once, so here every number has a place of its own, and a sum has a fixed order.
        table = torch.zeros(len(good), experts, dtype=torch.float64, device=kept.device)
        squares = table.scatter_(1, sequence.chosen, sequence.weight.double().square() * kept).sum(0)
        seen = good.sum()
        if counts is None:
            counts, mass, tokens = part, squares, seen
        else:
            counts, mass, tokens = counts + part, mass + squares, tokens + seen
    assert counts is not None, "a calibration set has at least one sequence"
    share = routed_weight * torch.clamp(counts / full_share_at, max=1.0)
    return Blend(
        counts, mass, torch.where(mass > 0, share, torch.zeros_like(share)).float(), int(tokens), full_share_at
    )


def squared_weights(sequence: Recorded, first: int, last: int) -> torch.Tensor:
    """(c, T) float32: the square of each token's routing weight for experts first … last - 1, 0 where not chosen."""
    chunk = last - first
    ours = (sequence.chosen >= first) & (sequence.chosen < last)
    column = torch.where(ours, sequence.chosen - first, chunk)  # the last column takes all others, and is dropped
    table = torch.zeros(len(column), chunk + 1, device=column.device)
    return table.scatter_(1, column, sequence.weight.square())[:, :chunk].T.contiguous()


def token_weights(sequence: Recorded, blended: Blend, first: int, last: int) -> torch.Tensor:
    """(c, T) float32: what each token of the sequence counts for experts first … last - 1."""
    share = blended.share[first:last, None]
    mass = blended.routed_mass[first:last, None].clamp(min=torch.finfo(torch.float64).tiny)
    squared = squared_weights(sequence, first, last)
    return (share * (squared.double() / mass).float()) + (1 - share) / blended.tokens


@dataclass(frozen=True)
class Batch:
    """Sequences first … last - 1, which are worked on together: of a short one an expert gets few tokens.

    Attributes:
        routed: their tokens that an expert gets on average.
        most: the largest number of them that one expert gets, known on the host, so that a gather of
            padded rows needs no synchronisation. Of all experts, so that shapes do not depend on chunks.
    """

    first: int
    last: int
    routed: int
    most: int


def batches(sequences: Iterable[Recorded], experts: int) -> list[Batch]:
    """Neighbouring sequences joined as long as they have at most `BATCH_TOKENS` tokens; one synchronisation for all."""
    bounds, tokens, parts = [0], 0, list[torch.Tensor]()
    for number, sequence in enumerate(sequences):
        counts = route_counts(sequence.chosen, experts)
        if tokens and tokens + len(sequence.chosen) <= BATCH_TOKENS:
            parts[-1] += counts
            tokens += len(sequence.chosen)
            bounds[-1] = number + 1
        else:
            parts.append(counts)
            tokens = len(sequence.chosen)
            bounds.append(number + 1)
    rows = torch.stack(parts).tolist()
    return [Batch(*ends, sum(row) // experts, max(row)) for ends, row in zip(pairwise(bounds), rows, strict=True)]


def joined(sequences: Sequence[Recorded], batch: Batch) -> Recorded:
    """A batch's sequences, one after the other."""
    parts = [sequences[number] for number in range(batch.first, batch.last)]
    if len(parts) == 1:
        return parts[0]
    return Recorded(*(torch.cat(columns) for columns in zip(*((p.x, p.chosen, p.weight) for p in parts), strict=True)))


def routed_rows(sequence: Recorded, first: int, last: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens routed to experts first … last - 1, padded to `most` rows an expert.

    Returns:
        Token numbers (c, most) int64 and squared routing weights (c, most) float32, both 0 where padded.
        Tokens whose weight is 0 are left out: they add nothing.
    """
    squared = squared_weights(sequence, first, last)  # (c, T)
    so_far = (squared > 0).cumsum(-1)
    # An expert's n-th token is the one at which its running count reaches n; past the last where it has fewer.
    wanted = torch.arange(1, min(most, squared.shape[1]) + 1, device=squared.device)
    rows = torch.searchsorted(so_far, wanted.repeat(len(squared), 1))
    padded = rows == squared.shape[1]
    rows.masked_fill_(padded, 0)
    return rows, squared.gather(1, rows).masked_fill_(padded, 0)
