"""Keys of config.json that transformers' class does not read, or cannot compute with, found by asking the class."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from quantizers.system.errors import ArchitectureError

FIRST_DENSE, TYPES = "first_k_dense_replace", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
NUMBERS = (1, 2, 4)  # tried for a size, besides the class's own, which may not fit the others
TEXT = "text_config"  # the section about text in the config.json of a model with more than text


def require_known_layers(config: Mapping[str, Any], made: Any) -> None:
    """Let a config `made` of config.json have as many dense layers as its `first_k_dense_replace` says.

    Some classes have a list for that, and do not read this key, which published files have and servers read.

    Raises:
        ArchitectureError: it is no number of layers, or the list in config.json says something else.
    """
    given, text = config.get(TEXT) or config, made.get_text_config()
    first, kinds = given.get(FIRST_DENSE), getattr(text, TYPES, None)
    if first is None or not kinds or set(kinds) - {DENSE, SPARSE}:
        return
    if type(first) is not int or not 0 <= first <= len(kinds):
        raise ArchitectureError(
            "", f"{FIRST_DENSE} is {reprlib.repr(first)}", f"a whole number from 0 to {len(kinds)} is needed"
        )
    plain = {key: value for key, value in given.items() if key != TYPES}
    by_class = [type(text)(**plain | {FIRST_DENSE: number}) for number in (0, len(kinds))]
    if getattr(by_class[0], TYPES) != getattr(by_class[1], TYPES):  # it reads the key
        return
    meant = [DENSE] * first + [SPARSE] * (len(kinds) - first)
    if given.get(TYPES) is not None and list(kinds) != meant:
        raise ArchitectureError(
            "",
            f"{FIRST_DENSE} is {first}, but {TYPES} has {kinds.count(DENSE)} dense layers, or in other places",
            "correct one of the two",
        )
    setattr(text, TYPES, meant)


def culprits(config: Mapping[str, Any], default: Any, works: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The keys of config.json, with their values, because of which a class cannot be made or computed.

    Those that are null, or a boolean, get another value, and are put back one by one. None may explain it.

    Args:
        default: a config of the class's own defaults.
        works: whether the class can be made of this config.json, and computed.
    """
    given, own = config, default.to_dict()
    if isinstance(config.get(TEXT), Mapping):
        given, own = config[TEXT], default.get_text_config().to_dict()

    def changed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {**config, TEXT: {**given, **values}} if given is not config else {**config, **values}

    odd = {key: value for key, value in given.items() if value is None or isinstance(value, bool)}
    suspects = {key: own[key] for key, value in odd.items() if own.get(key) not in (None, value)}
    for number in (None, *NUMBERS) if suspects else ():
        other = {key: number if number and type(value) is int else value for key, value in suspects.items()}
        if works(changed(other)):
            return {key: given[key] for key in other if not works(changed(other | {key: given[key]}))}
    return {}
