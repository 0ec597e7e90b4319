"""Kinds of hardware whose kernels are known, see quantizers/serving/kernels.py. Without pydantic: `--help` names them.

GPUs of SM80 to 88, SM89, SM90, the same with VLLM_USE_DEEP_GEMM_E8M0=0 in vLLM's environment, SM100 on; x86.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from quantizers.system.errors import InputError

from .gpu_names import gpus_named, known_gpus

Card = Literal["ampere", "ada", "hopper", "hopper-no-e8m0", "blackwell", "vllm-cpu"]
CARDS: tuple[Card, ...] = get_args(Card)
FROM_SM: dict[Card, int] = {"blackwell": 100, "hopper": 90, "ada": 89, "ampere": 80}


def card_of(name: str, place: str) -> Card:
    """The card of this name, or that of a GPU; an InputError for another name, and for GPUs of which none is known."""
    for card in CARDS:
        if name.strip().lower() == card:
            return card
    gpus = gpus_named(name)
    sm = known_gpus()[gpus[0]].get("sm", 0) if gpus else 0
    for card, least in FROM_SM.items():
        if sm >= least:
            return card
    problem = f"nothing is known of kernels on {gpus[0]}" if gpus else "no such card is known here"
    raise InputError(place, problem, f"give one of {', '.join(CARDS)}")


def known_cards(names: Iterable[str]) -> tuple[Card, ...]:
    """The cards of these names, each once; see `card_of`."""
    cards = {card_of(name, f"--as-served {name}") for name in names}
    return tuple(card for card in CARDS if card in cards)
