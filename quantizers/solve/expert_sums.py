"""The sums of what w2 reads: every token through every expert of a unit.

Legend: T rows of a block, H hidden, I expert width, c experts of a unit, m rows routed to an expert (padded);
x (T, H) is what w1 and w3 read, h (T, I) = act(x w1ᵀ) * (x w3ᵀ) what w2 reads. h lies transposed, (c, I, T): then one
matmul gives it for all experts of the unit, and each half of the result lies in one piece.

Sums are float32 and added block by block, in order, one block a matmul: torch does not promise the same
bits for other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantizers.device.kind import accelerated
from quantizers.device.timing import phase
from quantizers.forward.recorded import Recorded, usable_rows

from .input_sums import Unit
from .symmetric import add_gram, gram, mirror
from .token_weights import Survey, token_weights

Activation = Callable[[torch.Tensor], torch.Tensor]
ROUTED_PER_COLUMN = 32  # tokens routed for each column of w2: with more, every n-th block goes into `changes`


@dataclass
class WidthSums:
    """Blended sums of h for the experts of a unit, each of total weight 1.

    Attributes:
        gram: Σ h hᵀ (c, I, I) float32.
        mean: mean |h| (c, I) float32.
        changes: Σ d hᵀ (c, I, I) float32, where h + d is what the source's w1 and w3 give; over routed
            tokens only, weighted as in the blend. None where it was not asked for.
        seen: (c,) int64, rows of h that went into the sums.
        dropped: (c,) int64, rows left out: not usable themselves, or in the block's input.
    """

    gram: torch.Tensor
    mean: torch.Tensor
    changes: torch.Tensor | None
    seen: torch.Tensor
    dropped: torch.Tensor


def width_sums(
    blocks: Sequence[Recorded],
    found: Survey,
    gate_up: torch.Tensor,
    *,
    activation: Activation,
    unit: Unit,
    source: torch.Tensor | None = None,
    every: int = 1,
) -> WidthSums:
    """Every token through every expert of a unit.

    Args:
        blocks, found: see `token_weights.survey`.
        gate_up: (c, 2I, H), w1 above w3, in the dtype of x; rounded or not.
        activation: of the gate, usually SiLU.
        unit: first and last (exclusive) of its experts.
        source: (c, 2I, H) of the same dtype: the weights that `gate_up` was rounded from, for `changes`.
        every: read every n-th block only.
    """
    count, double_width, _ = gate_up.shape
    width, device = double_width // 2, gate_up.device
    total = torch.zeros(count, width, width, device=device)
    magnitude, mass = torch.zeros(count, width, device=device), torch.zeros(count, 1, device=device)
    seen, dropped = (torch.zeros(count, dtype=torch.int64, device=device) for _ in range(2))
    changes = None if source is None else torch.zeros_like(total)
    routed_mass = torch.zeros(count, dtype=torch.float64, device=device)
    step = max(1, found.routed() // (ROUTED_PER_COLUMN * width))
    products = torch.empty(0, device=device, dtype=gate_up.dtype)
    for number in range(0, len(blocks), every):
        block, table = blocks[number], found.tables[number]
        with phase("forced pass"):
            if products.shape[-1] != len(block.x):  # else the memory of the last block is used again
                products = gate_up.new_empty(count * double_width, len(block.x))
            torch.mm(gate_up.flatten(0, 1), block.x.mT, out=products)
            h = _gated(products.view(count, double_width, -1), activation)
        with phase("sums"):
            good = usable_rows(h, 1)  # (c, T)
            if accelerated(device) or not bool(good.all()):
                h.masked_fill_(~good.unsqueeze(1), 0)
            good &= block.usable
            # √w in the dtype of h, so that one operand serves both sides of the sum; and w is what it is squared.
            root = token_weights(block, found.blended, *unit).mul_(good).sqrt_().to(h.dtype)
            mass += root.float().square().sum(1, keepdim=True)
            seen += good.sum(1)
            dropped += (~good).sum(1)
        if source is not None and changes is not None and number % step == 0 and table.most(*unit):
            with phase("changes"):
                routed_mass += _add_changes(changes, h, good, block, table.routed(*unit), source, activation)
        with phase("sums"):
            rows = h.mul_(root.unsqueeze(1)).mT
            add_gram(total, rows, rows)
            magnitude += h.abs_().mul_(root.unsqueeze(1)).sum(-1, dtype=torch.float32)
        del h, rows  # otherwise they would live until the next block is done
    mass = mass.clamp(min=torch.finfo(torch.float32).tiny)
    share = found.blended.share[unit[0] : unit[1]] / routed_mass
    share = torch.where(routed_mass > 0, share, torch.zeros_like(share)).float()
    return WidthSums(
        mirror(total).div_(mass.unsqueeze(-1)),
        magnitude / mass,
        None if changes is None else changes.mul_(share[:, None, None]),
        seen,
        dropped,
    )


def _add_changes(
    changes: torch.Tensor,
    h: torch.Tensor,
    good: torch.Tensor,
    block: Recorded,
    routed: tuple[torch.Tensor, torch.Tensor],
    source: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """Add a block's Σ r² d hᵀ to `changes`; returns its Σ r² (c,) in float64.

    Args:
        h: (c, I, T), from the rounded weights.
        good: (c, T), which of its rows go into the sums.
        routed: rows and weights (c, m), see `Table.routed`.
    """
    rows, weight = routed
    wanted = _gated(torch.bmm(source, block.x[rows].mT), activation)  # (c, I, m)
    got = h.gather(2, rows.unsqueeze(1).expand(-1, h.shape[1], -1))
    kept = weight.square() * (usable_rows(wanted, 1) & good.gather(1, rows))
    d = wanted.sub_(got).mul_(kept.unsqueeze(1).to(h.dtype)).masked_fill_((kept == 0).unsqueeze(1), 0)
    changes += gram(d.mT, got.mT)
    return kept.double().sum(1)


def _gated(products: torch.Tensor, activation: Activation) -> torch.Tensor:
    """h (c, I, T) from x w1ᵀ above x w3ᵀ (c, 2I, T)."""
    gate, up = products.chunk(2, dim=1)
    return activation(gate).mul_(up)
