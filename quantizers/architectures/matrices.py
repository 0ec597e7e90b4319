"""The three matrices of a routed expert, with the names that this program uses for every family."""

from __future__ import annotations

from typing import Literal

Matrix = Literal["gate", "up", "down"]

MATRICES: tuple[Matrix, ...] = ("gate", "up", "down")  # w1, w3, w2 in MiniMax's names

# What transformers, llm-compressor and SGLang call them.
PROJECTIONS: dict[Matrix, str] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
# transformers' tensors of all experts (E, rows, columns), and which matrices of each they hold, one above the other.
FUSED: dict[str, tuple[Matrix, ...]] = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
