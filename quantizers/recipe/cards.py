"""Kinds of hardware whose kernels are known, see quantizers/serving/kernels.py. Without pydantic: `--help` names them.

GPUs of SM80 to 88, SM89, SM90, the same with VLLM_USE_DEEP_GEMM_E8M0=0 in vLLM's environment, SM100 on; x86.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from quantizers.system.errors import InputError

Card = Literal["ampere", "ada", "hopper", "hopper-no-e8m0", "blackwell", "vllm-cpu"]
CARDS: tuple[Card, ...] = get_args(Card)


def known_cards(names: Iterable[str]) -> tuple[Card, ...]:
    """The cards of these names, each once; an InputError for another name."""
    for name in names:
        if name not in CARDS:
            raise InputError(f"--as-served {name}", "no such card is known here", f"give one of {', '.join(CARDS)}")
    return tuple(card for card in CARDS if card in names)
