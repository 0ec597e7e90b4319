"""The gate of routed experts: from what w1 and w3 give to h, which w2 reads.

Most compute act(gate) * up, which a scale between w3 and w2 passes through unchanged. Others have a gate of their own,
clamped or shifted, which lets none through: their module's `_apply_gate`, which all of transformers' ways call.
Experts without a gate compute act(up). A positive scale s of up's rows comes out of it as s^n where act is homogeneous
of degree n: relu 1, its square 2. Out of others it does not. Biases are part of the products.

Legend: I width of an expert, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .matrices import first_parameter

# x w1ᵀ above x w3ᵀ (…, 2I, T), or x w3ᵀ (…, I, T) ─► h (…, I, T), which may use the memory of these products.
Gate = Callable[[torch.Tensor], torch.Tensor]
TOKENS = 1024  # that go through a module's own gate at a time, which needs several arrays of their size


def plain_gate(activation: Callable[[torch.Tensor], torch.Tensor]) -> Gate:
    """act(gate) * up."""

    def gate(products: torch.Tensor) -> torch.Tensor:
        gate, up = products.chunk(2, dim=-2)
        return activation(gate).mul_(up)

    return gate


def gate_of(experts: Any, own: bool) -> Gate:
    """The gate of a module of experts: its own, or act(gate) * up with its activation, or act(up) without a gate."""
    if not own:
        activation: Gate = getattr(experts, "act_fn", torch.nn.functional.silu)
        return plain_gate(activation) if first_parameter(experts) == "gate_up_proj" else activation

    in_turns = not getattr(experts, "is_concatenated", True)

    def gate(products: torch.Tensor) -> torch.Tensor:
        *batch, double, tokens = products.shape
        h = products.new_empty(*batch, double // 2, tokens)
        for h_chunk, products_chunk in zip(h.split(TOKENS, -1), products.split(TOKENS, -1), strict=True):
            rows = products_chunk.mT
            rows = rows.unflatten(-1, (2, -1)).mT.flatten(-2) if in_turns else rows
            h_chunk.copy_(experts._apply_gate(rows).mT)
        return h

    return gate
