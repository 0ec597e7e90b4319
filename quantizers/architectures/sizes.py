"""The sizes of one model, read from its config.json, which is checked against the family's facts on the way."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from quantizers.system.errors import ArchitectureError

from .architecture import Architecture
from .rotary import rotary_factor

# A config.json with larger sizes than these is broken or hostile.
LIMITS = {"layers": 1000, "experts": 4096, "vocabulary": 10_000_000}
LARGEST_SIZE = 1 << 20
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

    def value(self, expression: str) -> int:
        """A sum of products such as `heads * head_dim`, or a quotient such as `hidden / heads`.

        Raises:
            ValueError: a quotient is not whole.
        """
        total = 0
        for summand in expression.split("+"):
            product = 1
            for sign, word in re.findall(r"([*/]?)\s*(\w+)", summand):
                factor = int(word) if word.isdigit() else self[word]
                if sign == "/":
                    if not factor or product % factor:
                        raise ValueError(f"{product} is no multiple of {word}, {factor}")
                    product //= factor
                else:
                    product *= factor
            total += product
        return total

    def shape(self, terms: list[str]) -> tuple[int, ...]:
        """Evaluate a shape such as `["heads * head_dim", "hidden"]`."""
        return tuple(self.value(term) for term in terms)


def sizes_of(facts: Architecture, config: dict[str, Any], where: str) -> Sizes:
    """Read the sizes from config.json and check it against the facts.

    A size that config.json gives under another name than the facts do, or leaves to transformers, has the value that it
    has in the model's config class.

    Raises:
        ArchitectureError: a size is missing or absurd, or a value contradicts the facts.
    """
    sizes = Sizes({name: size.value for name, size in facts.sizes.items() if size.value is not None})
    open_sizes = {name: size for name, size in facts.sizes.items() if size.value is None}
    given = {name: size for name, size in open_sizes.items() if size.otherwise is None or config.get(size.key)}
    unnamed = [size.key for size in given.values() if config.get(size.key) is None]
    named = config | (_of_config_class(facts, config, unnamed) if unnamed else {})
    for name, size in given.items():
        value = named.get(size.key)
        limit = LIMITS.get(name, LARGEST_SIZE)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise ArchitectureError(
                f"{where}: {size.key} is {reprlib.repr(value)}; a whole number from 1 to {limit} is needed"
            )
        sizes[name] = value
    for name, size in open_sizes.items():
        if name not in given:
            assert size.otherwise is not None
            try:
                sizes[name] = sizes.value(size.otherwise)
            except ValueError as failure:
                raise ArchitectureError(
                    f"{where}: has no {size.key}, which is then {size.otherwise}, but {failure}; correct this file"
                ) from None
    for key, expected in facts.asserts.items():
        if key in config and config[key] != expected:
            raise ArchitectureError(
                f"{where}: {key} is {reprlib.repr(config[key])}, but the facts of {facts.model_type} rely on "
                f"{expected!r}; such a model would be computed wrongly and is refused; give another model"
            )
    if sizes["chosen"] > sizes["experts"]:
        raise ArchitectureError(
            f"{where}: {facts.sizes['chosen'].key} is larger than {facts.sizes['experts'].key}; correct this file"
        )
    if sizes["experts"] % sizes.get("groups", 1) or sizes["experts"] < 2 * sizes.get("groups", 0):
        raise ArchitectureError(
            f"{where}: {facts.sizes['experts'].key} {sizes['experts']} are not two or more in each of "
            f"{facts.sizes['groups'].key} {sizes['groups']} groups, of which the router adds up the best two; correct "
            "this file"
        )
    if sizes.get("chosen_groups", 0) > sizes.get("groups", 0):
        raise ArchitectureError(
            f"{where}: {facts.sizes['chosen_groups'].key} is larger than {facts.sizes['groups'].key}; correct this file"
        )
    if "groups" in sizes and not sizes["chosen"] <= sizes["chosen_groups"] * sizes["experts"] // sizes["groups"]:
        raise ArchitectureError(
            f"{where}: {facts.sizes['chosen_groups'].key} {sizes['chosen_groups']} of {sizes['groups']} groups have "
            f"fewer experts than {facts.sizes['chosen'].key} {sizes['chosen']}; correct this file"
        )
    if sizes["layers"] * sizes["experts"] > MOST_EXPERTS:
        raise ArchitectureError(
            f"{where}: {facts.sizes['layers'].key} {sizes['layers']} with {facts.sizes['experts'].key} "
            f"{sizes['experts']} is more than any model has; correct this file"
        )
    if "kv_heads" in sizes and sizes["heads"] % sizes["kv_heads"]:
        raise ArchitectureError(
            f"{where}: {facts.sizes['kv_heads'].key} {sizes['kv_heads']} does not divide {facts.sizes['heads'].key} "
            f"{sizes['heads']}; correct this file"
        )
    sizes.positions = facts.positions or int(config.get("max_position_embeddings") or 0) or None
    sizes.state = sizes["hidden"] * facts.streams
    sizes.beside = (1 + facts.handed.width if facts.handed else 0) + facts.tokens
    rotary_factor(facts, config, sizes, where)
    sizes.dense = dense_layers(facts, config, sizes["layers"], where)
    sizes.mtp = range(sizes["layers"], sizes["layers"] + _mtp_layers(facts, config, where))
    return sizes


def _of_config_class(facts: Architecture, config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The values that these keys have in transformers, which knows other names and defaults; only those that it has."""
    from .skeleton import FAILURES, config_of, model_class  # takes seconds: transformers is imported with it

    try:
        made = config_of(model_class(facts.model_class, ""), config)
    except (ArchitectureError, *FAILURES):  # without it the size is refused by its name
        return {}
    return {key: getattr(made, key, None) for key in keys}


def _mtp_layers(facts: Architecture, config: Mapping[str, Any], where: str) -> int:
    """How many layers predict further tokens."""
    key = facts.mtp_layer.layers if facts.mtp_layer else None
    count = (config.get(key) or 0) if key else 0
    if type(count) is not int or not 0 <= count <= MOST_MTP_LAYERS:
        raise ArchitectureError(
            f"{where}: {key} is {reprlib.repr(count)}; a whole number from 0 to {MOST_MTP_LAYERS} is needed"
        )
    return count


def dense_layers(facts: Architecture, config: Mapping[str, Any], layers: int, where: str) -> frozenset[int]:
    """The numbers of the layers without experts, from a list of them, or from how many there are at the start.

    Raises:
        ArchitectureError: config.json says something else, or leaves no layer with experts.
    """
    if facts.dense_layer is None:
        return frozenset(number for kind in facts.kinds if kind.dense for number in kind.layers)
    key = facts.dense_layer.layers
    value = config.get(key, facts.dense_layer.otherwise)
    numbers = range(value) if type(value) is int and 0 <= value <= layers else value or []
    if not isinstance(numbers, (list, range)) or not all(type(n) is int and 0 <= n < layers for n in numbers):
        raise ArchitectureError(
            f"{where}: {key} is {reprlib.repr(value)}; the numbers of the layers without experts are needed, from 0 "
            f"to {layers - 1}, or how many there are at the start"
        )
    kinds = config.get("mlp_layer_types")  # which transformers writes besides, or instead
    if kinds is not None and kinds != ["dense" if number in numbers else "sparse" for number in range(layers)]:
        raise ArchitectureError(
            f"{where}: mlp_layer_types is {reprlib.repr(kinds)}, but {key} or its default means that the layers "
            f"{list(numbers)} are dense and the others are not; correct one of the two"
        )
    if len(set(numbers)) == layers:
        raise ArchitectureError(f"{where}: {key} leaves no layer with experts; give a mixture-of-experts model")
    return frozenset(numbers)
