"""The sums that a chunk of experts is solved from, gathered from one layer's recorded inputs.

Legend: T tokens, H hidden, I expert width, c experts of a chunk, m tokens routed to an expert (padded);
x (T, H) is what w1 and w3 read, h (T, I) = act(x w1ᵀ) * (x w3ᵀ) what w2 reads.

Sums are float32 and added batch by batch, in order, one batch a matmul: torch does not promise the same
bits for other shapes. A batch is one sequence, or a few short ones, always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantizers.device.timing import phase
from quantizers.forward.recorded import Recorded

from .symmetric import add_gram, gram, mirror
from .token_weights import Batch, Blend, blank, joined, routed_rows, token_weights, usable

Activation = Callable[[torch.Tensor], torch.Tensor]
ROUTED_PER_COLUMN = 32  # tokens routed for each column of w2: with more, every n-th batch goes into `changes`


def input_grams(
    sequences: Sequence[Recorded],
    together: Sequence[Batch],
    blended: Blend,
    all_gram: torch.Tensor,
    first: int,
    last: int,
) -> torch.Tensor:
    """Blended Σ x xᵀ of experts first … last - 1, each of total weight 1: (c, H, H) float32.

    Args:
        sequences: the layer's recorded sequences.
        together: how they are joined, see `token_weights.batches`.
        all_gram: (H, H) float32, Σ x xᵀ over all tokens, see `token_weights.InputSums`.
    """
    chunk, hidden, device = last - first, all_gram.shape[0], all_gram.device
    routed = torch.zeros(chunk, hidden, hidden, device=device)
    for batch in together:
        if batch.most:
            sequence = joined(sequences, batch)
            rows, squared = routed_rows(sequence, first, last, batch.most)
            picked = sequence.x[rows]  # (c, m, H)
            blank(picked, usable(picked))
            add_gram(routed, picked * squared.unsqueeze(-1).to(picked.dtype), picked)
            del sequence, picked  # otherwise they would live until the next batch is made
    mirror(routed)
    share = blended.share[first:last, None, None]
    mass = blended.routed_mass[first:last, None, None].clamp(min=torch.finfo(torch.float64).tiny)
    return share * (routed.double() / mass).float() + (1 - share) * (all_gram / blended.tokens)


@dataclass
class WidthSums:
    """Blended sums of h for experts first … first + c - 1, each of total weight 1.

    Attributes:
        gram: Σ h hᵀ (c, I, I) float32.
        mean: mean |h| (c, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, where h + d is what the source's w1 and w3 give; over routed
            tokens only, weighted as in the blend. None where it was not asked for.
        seen: (c,) int64, rows of h that went into the sums.
        dropped: (c,) int64, rows left out, see `token_weights.usable`.
    """

    gram: torch.Tensor
    mean: torch.Tensor
    changes: torch.Tensor | None
    seen: torch.Tensor
    dropped: torch.Tensor


def width_sums(
    sequences: Sequence[Recorded],
    together: Sequence[Batch],
    gate_up: torch.Tensor,
    *,
    activation: Activation,
    blended: Blend,
    first: int,
    source: torch.Tensor | None = None,
) -> WidthSums:
    """Every token through every expert of a chunk.

    Args:
        sequences, together: see `input_grams`.
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x; rounded or not.
        activation: of the gate, usually SiLU.
        first: the number of the first expert of this chunk.
        source: (c, 2I, H) of the same dtype: the weights that `gate_up` was rounded from, for `changes`.
    """
    chunk, double_width, _ = gate_up.shape
    width, last, device = double_width // 2, first + chunk, gate_up.device
    total = torch.zeros(chunk, width, width, device=device)
    magnitude = torch.zeros(chunk, width, device=device)
    mass = torch.zeros(chunk, 1, device=device)
    seen, dropped = (torch.zeros(chunk, dtype=torch.int64, device=device) for _ in range(2))
    changes = None if source is None else torch.zeros_like(total)
    routed_mass = torch.zeros(chunk, dtype=torch.float64, device=device)
    step = max(1, sum(batch.routed for batch in together) // (ROUTED_PER_COLUMN * width))
    for number, batch in enumerate(together):
        sequence = joined(sequences, batch)
        with phase("forced pass"):
            h = _hidden(sequence.x, gate_up, activation)  # (c, T, I)
        with phase("sums"):
            good = usable(h) & usable(sequence.x)  # (c, T)
            blank(h, good)
            weight = token_weights(sequence, blended, first, last) * good
            weighted = h * weight.unsqueeze(-1).to(h.dtype)
            add_gram(total, weighted, h)
            magnitude += weighted.abs().sum(1, dtype=torch.float32)
            mass += weight.sum(1, keepdim=True)
            seen += good.sum(1)
            dropped += (~good).sum(1)
            del weighted
        if source is not None and changes is not None and number % step == 0 and batch.most:
            with phase("changes"):
                rows, weight = routed_rows(sequence, first, last, batch.most)  # (c, m) each
                h = h.gather(1, rows.unsqueeze(-1).expand(-1, -1, width))  # (c, m, I)
                wanted = _hidden(sequence.x[rows], source, activation)
                weight = weight * (usable(wanted) & good.gather(1, rows))
                d = blank(wanted.sub_(h), weight > 0).mul_(weight.unsqueeze(-1).to(h.dtype))
                changes += gram(d, h)
                routed_mass += weight.sum(1)
                del wanted, d
        del sequence, h  # otherwise they would live until the next batch is made
    mass = mass.clamp(min=torch.finfo(torch.float32).tiny)
    share = blended.share[first:last] / routed_mass
    share = torch.where(routed_mass > 0, share, torch.zeros_like(share)).float()
    return WidthSums(
        mirror(total) / mass.unsqueeze(-1),
        magnitude / mass,
        None if changes is None else changes * share[:, None, None],
        seen,
        dropped,
    )


def _hidden(x: torch.Tensor, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """What w2 reads, (c, T, I), of rows (T, H) that all experts read or (c, T, H)."""
    gate, up = torch.matmul(x, gate_up.mT).chunk(2, dim=-1)
    return activation(gate).mul_(up)
