"""Under-routed experts: what an expert is solved from that the router sent too few tokens, or none.

Its share a_e says how much of its Hessian comes from the tokens that were sent to it; the rest comes from all tokens,
which every expert sees (docs/explanation/method.md):

    a_e = a · min(1, n_e / n0)

With n_e routed tokens, fewer than n0, the expert is under-routed, and relies on all tokens the more. With none, or
where all its routing weights are zero, the share is 0: all tokens count alike for it. A smaller share is part of the
method, and counted in the report; a share of 0 is a fallback, with a line of its own.

n0, `full_share_at`, is the hidden size: with fewer tokens than columns the routed Hessian is singular. It holds for w2
as well, although that has as many columns as the expert is wide.

Legend: E experts, a the recipe's `routed_weight`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def shares(routed_tokens: Tensor, mass: Tensor, routed_weight: float, full_share_at: int) -> Tensor:
    """a_e (E,) float32 from each expert's number of routed tokens (E,).

    Args:
        mass: (E,) float64, Σ r² of each expert's routing weights r.
        routed_weight: a, 0 to 1.
        full_share_at: n0.
    """
    share = routed_weight * torch.clamp(routed_tokens / full_share_at, max=1.0)
    return torch.where(mass > torch.finfo(torch.float32).tiny, share, torch.zeros_like(share)).float()


def under_routed_figures(routed_tokens: Tensor, share: Tensor, full_share_at: int) -> dict[str, float]:
    """The report's figures of a layer: n0, the number of under-routed experts, and the smallest share.

    Both tensors (E,) are on the host.
    """
    return {
        "full_share_at": full_share_at,
        "experts": int((routed_tokens < full_share_at).sum()),
        "smallest_share": float(share.min()),
    }


def unrouted_line(expert: int, routed_tokens: float) -> str:
    """The report's line for an expert whose share is 0."""
    return f"expert {expert}: {routed_tokens:.0f} routed tokens, so all tokens count alike for it"
