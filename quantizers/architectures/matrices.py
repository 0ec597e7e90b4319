"""The matrices of a routed expert, with the names that this program uses for every family.

Most have three. Experts without a gate have two, down · act(up · x): nothing is called gate there.
"""

from __future__ import annotations

from typing import Any, Literal

Matrix = Literal["gate", "up", "down"]

MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")  # w1, w3, w2 in MiniMax's names

# What transformers, llm-compressor and SGLang call them.
PROJECTIONS: dict[Matrix, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# transformers' tensors of all experts (E, rows, columns), and which matrices of each they hold, one above the other.
FUSED: dict[str, tuple[Matrix, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
WITHOUT_GATE: dict[str, tuple[Matrix, ...]] = {"up_proj": ("up",), "down_proj": ("down",)}


def first_parameter(experts: Any) -> str:
    """The name of the parameter that holds what reads an expert's input, gate above up or up alone, in a module."""
    return next(name for name in ("gate_up_proj", "up_proj") if hasattr(experts, name))


def matrices_of(first: Any, down: Any) -> tuple[Matrix, ...]:
    """The matrices in what reads an expert's input, (…, 2I, H) or (…, I, H) without a gate, and in down (…, H, I)."""
    return MATRICES if first.shape[-2] > down.shape[-1] else MATRICES[1:]


def as_held(first: Any, down: Any, *, transposed: bool, interleaved: bool) -> tuple[Any, Any]:
    """Matrices that read an expert's input (…, 2I, H), and down (…, H, I), as a module holds them."""
    if interleaved:  # a row of gate, a row of up
        first = first.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)
    return (first.mT, down.mT) if transposed else (first, down)


def as_stacked(experts: Any, *, transposed: bool, interleaved: bool) -> tuple[Any, Any]:
    """The inverse for a module's own: what reads an expert's input (E, 2I, H), or (E, I, H), and down (E, H, I)."""
    first, down = experts.get_parameter(first_parameter(experts)).data, experts.down_proj.data
    if transposed:
        first, down = first.mT, down.mT
    if interleaved:
        first = first.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)
    return first, down


def bias_of(experts: Any, *, interleaved: bool = False, **_: bool) -> Any:
    """Biases that a module adds to the products of gate above up, (E, 2I), or of up alone; None for nothing."""
    bias = getattr(experts, f"{first_parameter(experts)}_bias", None)
    if bias is None:
        return None
    return bias.data.unflatten(-1, (-1, 2)).mT.flatten(-2) if interleaved else bias.data


def split_first(stacked: Any, matrices: int) -> tuple[Any, ...]:
    """The matrices (…, I, H) of those that read an expert's input (…, 2I, H), or (…, I, H) of one of two `matrices`."""
    parts: tuple[Any, ...] = stacked.chunk(matrices - 1, dim=-2)
    return parts
