"""The sums that everything is solved from, gathered from one layer's recorded inputs.

Legend: T tokens of one sequence, H hidden, I expert width, E experts, c experts of a chunk, K experts
chosen per token; x (T, H) is what the MoE block reads, h_e (T, I) = act(x w1ᵀ) * (x w3ᵀ) what w2 reads.

Every expert sees every token (a router sends some experts too few to know their inputs by), and the
tokens the router really sends count more. Of two ways of counting tokens, each of total weight 1,

    G_e = a_e Σ_routed r² h hᵀ / Σ_routed r²  +  (1 − a_e) Σ_all h hᵀ / n_all        (r: routing weight)

is the blend, with a_e = a · min(1, n_e / n0): an expert with few routed tokens leans on all of them.
Because routing is known before the experts run, the blend is one weighted sum: nothing else is kept.
Sums are float32 and added sequence by sequence, in order, one sequence a matmul: torch does not
promise the same bits for other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from .phases import phase
from .symmetric import add_gram, gram, mirror

Activation = Callable[[torch.Tensor], torch.Tensor]
LARGEST = 1e16  # squares of this, times ten million tokens, are still finite in float32


@dataclass(frozen=True)
class Recorded:
    """One sequence as the MoE block of a layer saw it.

    Attributes:
        x: (T, H), the block's input.
        chosen: (T, K) int64, the experts the router chose.
        weight: (T, K) float32, their routing weights.
    """

    x: torch.Tensor
    chosen: torch.Tensor
    weight: torch.Tensor


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


def route_counts(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(E,) int64: how many tokens each expert was sent, from (T, K) choices."""
    return torch.zeros(experts, dtype=torch.int64, device=chosen.device).scatter_add_(
        0, chosen.flatten(), torch.ones_like(chosen.flatten())
    )


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
        flat = sequence.chosen.flatten()
        kept = good.unsqueeze(-1).expand_as(sequence.chosen).flatten()
        part = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, kept.long())
        heavy = torch.zeros(experts, dtype=torch.float64, device=flat.device).scatter_add_(
            0, flat, sequence.weight.flatten().double().square() * kept
        )
        seen = good.sum()
        if counts is None:
            counts, mass, tokens = part, heavy, seen
        else:
            counts, mass, tokens = counts + part, mass + heavy, tokens + seen
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


@dataclass
class ExpertSums:
    """Blended sums of experts first … first + c - 1, each of total weight 1.

    Attributes:
        input_gram: (c, H, H) float32, of x.
        width_gram: (c, I, I) float32, of h_e.
        width_mean: (c, I) float32, blended mean |h_e|.
        seen: (c,) int64, rows of h_e that went into the sums.
        dropped: (c,) int64, rows left out, see `usable`.
    """

    input_gram: torch.Tensor
    width_gram: torch.Tensor
    width_mean: torch.Tensor
    seen: torch.Tensor
    dropped: torch.Tensor


def routed_rows(sequence: Recorded, first: int, last: int, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens routed to experts first … last - 1, padded to `most` rows an expert.

    Returns:
        Token numbers (c, most) int64 and squared routing weights (c, most) float32, both 0 where padded.
        Tokens whose weight is 0 are left out: they add nothing.
    """
    squared = squared_weights(sequence, first, last)  # (c, T)
    hit = squared > 0
    place = hit.cumsum(-1) - 1  # a routed token's place in its expert's row
    kept = min(most, squared.shape[1])
    place = torch.where(hit & (place < kept), place, kept)  # the last column takes all others, and is dropped
    tokens = torch.arange(squared.shape[1], device=squared.device).expand_as(place)
    rows = torch.zeros(len(squared), kept + 1, dtype=torch.int64, device=squared.device)
    weights = torch.zeros(len(squared), kept + 1, device=squared.device)
    return rows.scatter_(1, place, tokens)[:, :kept], weights.scatter_(1, place, squared)[:, :kept]


def expert_sums(
    sequences: Sequence[Recorded] | Iterable[Recorded],
    gate_up: torch.Tensor,
    activation: Activation,
    blended: Blend,
    all_gram: torch.Tensor,
    most_routed: Sequence[int],
    first: int,
) -> ExpertSums:
    """All sums that the experts first … first + c - 1 are solved from: every token through every expert.

    Args:
        sequences: the layer's recorded sequences, in order.
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x.
        activation: of the gate, usually SiLU.
        all_gram: (H, H) float32, Σ x xᵀ over all tokens, see `InputSums`.
        most_routed: for each sequence, the largest number of its tokens that one expert gets (known
            on the host, so that the padded gather needs no synchronisation).
        first: the number of the first expert of this chunk.
    """
    chunk, double_width, hidden = gate_up.shape
    width, last, device = double_width // 2, first + chunk, gate_up.device
    routed = torch.zeros(chunk, hidden, hidden, device=device)
    width_gram = torch.zeros(chunk, width, width, device=device)
    width_sum = torch.zeros(chunk, width, device=device)
    mass = torch.zeros(chunk, 1, device=device)
    seen = torch.zeros(chunk, dtype=torch.int64, device=device)
    dropped = torch.zeros(chunk, dtype=torch.int64, device=device)
    for sequence, most in zip(sequences, most_routed, strict=True):
        x = sequence.x
        with phase("sums"):
            if most:
                rows, squared = routed_rows(sequence, first, last, most)
                picked = x[rows]  # (c, most, H)
                blank(picked, usable(picked))
                add_gram(routed, picked * squared.unsqueeze(-1).to(x.dtype), picked)
        with phase("forced pass"):
            gate, up = torch.matmul(x, gate_up.mT).chunk(2, dim=-1)  # (c, T, I) each
            h = activation(gate).mul_(up)
        with phase("sums"):
            good = usable(h) & usable(x)  # (c, T)
            blank(h, good)
            weight = token_weights(sequence, blended, first, last) * good
            weighted = h * weight.unsqueeze(-1).to(h.dtype)
            add_gram(width_gram, weighted, h)
            width_sum += weighted.abs().sum(1, dtype=torch.float32)
            mass += weight.sum(1, keepdim=True)
            seen += good.sum(1)
            dropped += (~good).sum(1)
    mirror(routed)
    mirror(width_gram)
    share = blended.share[first:last, None, None]
    routed_mass = blended.routed_mass[first:last, None, None].clamp(min=torch.finfo(torch.float64).tiny)
    input_gram = share * (routed.double() / routed_mass).float() + (1 - share) * (all_gram / blended.tokens)
    mass = mass.clamp(min=torch.finfo(torch.float32).tiny)
    return ExpertSums(input_gram, width_gram / mass.unsqueeze(-1), width_sum / mass, seen, dropped)
