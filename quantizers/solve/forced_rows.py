"""What the forced pass makes of its products: the inputs of w2, and their sums.

A kernel weighs them on a GPU, see solve/kernels: they are moved once, where torch's own operations would move them four
times. It gives the same rows; the mean is added in another order.

Legend: c experts of a unit, I expert width, T rows of a block. All of it lies transposed, (c, I, T).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quantizers.device.devices import is_accelerator
from quantizers.device.triton_support import use_kernel
from quantizers.forward.recorded import usable_rows

from .kernels import launch
from .symmetric import add_gram

Activation = Callable[[torch.Tensor], torch.Tensor]


def gated(products: torch.Tensor, activation: Activation) -> torch.Tensor:
    """h (c, I, T) = act(x w1ᵀ) * (x w3ᵀ), from x w1ᵀ above x w3ᵀ (c, 2I, T)."""
    gate, up = products.chunk(2, dim=1)
    return activation(gate).mul_(up)


def gated_and_looked_at(products: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gated`, and which rows are usable (c, T); in the others h is worth nothing, and perhaps not finite."""
    h = gated(products, activation)
    return h, usable_rows(h, 1)


def no_magnitude(like: torch.Tensor, width: int) -> torch.Tensor:
    """What `add_weighed` adds to, before the first row: (c, I, …) float32, together Σ w |h|.

    Args:
        like: (c, …), of the dtype of h and where that lies.
        width: I.
    """
    return torch.zeros(len(like), width, launch.SUMS if _by_kernel(like) else 1, device=like.device)


def add_weighed(h: torch.Tensor, root: torch.Tensor, total: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Add Σ w h hᵀ to `total` and w |h| to `magnitude`.

    Args:
        h: (c, I, T), overwritten.
        root: √w (c, T), of the same dtype; 0 for rows that are left out, whatever h is there.
        total: (c, I, I) float32, see `symmetric.add_gram`.
        magnitude: see `no_magnitude`.
    """
    if _by_kernel(h):
        launch.weigh_rows(h, root, magnitude)
        add_gram(total, h.mT, h.mT)
        return
    weigh_rows(h, root)
    add_gram(total, h.mT, h.mT)
    magnitude += h.abs_().mul_(root.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32)


def weigh_rows(h: torch.Tensor, root: torch.Tensor) -> None:
    """h *= root, zero where root is, whatever h is there; arguments are those of `add_weighed`."""
    left_out = root == 0
    if is_accelerator(h.device) or bool(left_out.any()):
        h.masked_fill_(left_out.unsqueeze(1), 0)
    h.mul_(root.unsqueeze(1))


def _by_kernel(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.bfloat16 and use_kernel("weigh_rows", tensor.device)
