"""The sizes of one model, and what a config.json must fulfil before a model is made of it."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, Final

from quantizers.system.errors import ArchitectureError

from .architecture import Architecture

# This program's words for sizes, with their keys in config.json, of which a model has one.
KEYS: Final = {
    "layers": ("num_hidden_layers",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok",),
    "hidden": ("hidden_size",),
    "width": ("moe_intermediate_size", "intermediate_size"),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "groups": ("n_group",),
    "chosen_groups": ("topk_group",),
}
# A config.json with larger sizes than these is broken or hostile.
LIMITS = {"layers": 1000, "experts": 4096, "vocabulary": 10_000_000}
LARGEST_SIZE = 1 << 20
OF_SIZES = ("_size", "_dim", "_rank", "_heads", "_layers", "_experts")  # ends of the keys of all others
MOST_EXPERTS = 200_000  # over all layers
MOST_MTP_LAYERS = 16


class Sizes(dict[str, int]):
    """The sizes of one model, by our names for them: layers, experts, chosen, hidden, width, …

    Attributes:
        dense: the numbers of the layers that have no experts.
        mtp: the numbers of the layers that predict further tokens, which follow the others and are not among `layers`.
        positions: how many tokens of a text the model was made for; None where config.json does not say it.
        state: numbers of a token's state between two layers: the hidden size, times the model's streams.
        beside: 32-bit numbers that are kept of a token besides its state: what a layer hands on, and the token's id.
    """

    dense: frozenset[int] = frozenset()
    mtp: range = range(0)
    positions: int | None = None
    state: int = 0
    beside: int = 0

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of what is kept of a token between two layers: its state in `itemsize` each, and what is beside it."""
        return self.state * itemsize + self.beside * 4

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of the layers that have experts."""
        return [number for number in range(self["layers"]) if number not in self.dense]


def sizes_of(facts: Architecture) -> Sizes:
    """The sizes of the model that the facts are about."""
    sizes = Sizes({name: size.value for name, size in facts.sizes.items()})
    sizes.positions = facts.positions
    sizes.state = sizes["hidden"] * facts.streams
    sizes.beside = (1 + facts.handed.width if facts.handed else 0) + facts.tokens
    sizes.dense = frozenset(number for kind in facts.kinds if kind.dense for number in kind.layers)
    sizes.mtp = range(sizes["layers"], sizes["layers"] + (len(facts.mtp.layers) if facts.mtp else 0))
    return sizes


def is_of(facts: Architecture, config: Mapping[str, Any]) -> bool:
    """Whether a config.json has the sizes of the facts' model, as far as it gives them by their keys."""
    given = config.get("text_config", config)
    return all(given.get(size.key, size.value) == size.value for size in facts.sizes.values())


def require_sane(config: Mapping[str, Any]) -> None:
    """Refuse a config.json of which no model can be made, since a size is no whole number, or absurd."""
    limits = {key: LIMITS.get(name, LARGEST_SIZE) for name, keys in KEYS.items() for key in keys}
    for key, value in config.items():
        limit = limits.get(key, LARGEST_SIZE)
        known = key in limits and value is not None and (type(value) is not int or value < 1)
        if known or (type(value) is int and value > limit and (key in limits or key.endswith(OF_SIZES))):
            raise ArchitectureError(f"{key} is {reprlib.repr(value)}; a whole number from 1 to {limit} is needed")


def require_possible(facts: Architecture) -> None:
    """Refuse a model whose sizes contradict each other, naming their keys in config.json."""
    sizes, keys = sizes_of(facts), {name: f"{size.key} {size.value}" for name, size in facts.sizes.items()}
    groups, chosen_groups = sizes.get("groups", 1), sizes.get("chosen_groups", 1)
    problem = None
    if sizes["chosen"] > sizes["experts"]:
        problem = f"{keys['chosen']} is larger than {keys['experts']}"
    elif groups > 1 and (sizes["experts"] % groups or sizes["experts"] < 2 * groups):
        problem = (
            f"{keys['experts']} are not two or more in each of {keys['groups']} groups, of which the router adds up "
            "the best two"
        )
    elif chosen_groups > groups:
        problem = f"{keys['chosen_groups']} is larger than {keys['groups']}"
    elif sizes["chosen"] > chosen_groups * sizes["experts"] // groups:
        problem = f"{keys['chosen_groups']} of {groups} groups have fewer experts than {keys['chosen']}"
    elif sizes["layers"] * sizes["experts"] > MOST_EXPERTS:
        problem = f"{keys['layers']} with {keys['experts']} is more than any model has"
    elif sizes["heads"] % sizes.get("kv_heads", 1):
        problem = f"{keys['kv_heads']} does not divide {keys['heads']}"
    if problem:
        raise ArchitectureError(f"{problem}; correct this file")
