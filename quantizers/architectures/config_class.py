"""A config.json as transformers' class takes it: what it does not read is handed on, what it cannot compute with named.

It is asked, not described: keys are changed, and the class is made or computed again.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from quantizers.system.errors import ArchitectureError

from .contradictions import CORRECT, FACTOR, TEXT, refuse_two_spellings
from .skeleton import FAILURES, Skeleton
from .whole_class import config_class_of, saved_with_later

FIRST_DENSE, TYPES = "first_k_dense_replace", "mlp_layer_types"
DENSE, SPARSE = "dense", "sparse"
NUMBERS = (1, 2, 4)  # tried for a size, besides the class's own, which may not fit the others


def config_of(model_class: Any, config: Mapping[str, Any]) -> Any:
    """transformers' config of a config.json, without what says how the files are quantized.

    transformers writes an infinity as `{"__float__": "Infinity"}`. It has `rotary_dim` in published files, of how many
    channels of each head are rotated, but does not read it (huggingface/transformers#48241): it is handed on. So is
    the number of dense layers.

    Raises:
        FAILURES: the class takes no such values.
        ArchitectureError: one of the two is out of range, or two keys contradict each other.
    """
    config_class = config_class_of(model_class, config)
    refuse_two_spellings(config, config_class)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}

    def number(entry: dict[str, Any]) -> Any:
        return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry

    made = config_class(**json.loads(json.dumps(plain), object_hook=number))
    _hand_on_dense_layers(config, made)
    text = made.get_text_config()
    rotary = getattr(text, "rotary_dim", None)
    if rotary is not None:
        head = _head_size(text)
        if type(rotary) is not int or not 0 < rotary <= head or rotary % 2:
            raise ArchitectureError(
                "", f"rotary_dim is {reprlib.repr(rotary)}", f"an even number up to {head} is needed"
            )
        stated = text.rope_parameters.setdefault(FACTOR, rotary / head)
        if stated != rotary / head:
            raise ArchitectureError(
                "",
                f"rope_parameters.{FACTOR} is {reprlib.repr(stated)}, but rotary_dim means {rotary / head}",
                CORRECT,
            )
    return made


def rotated_channels(config: Any) -> int | None:
    """Number of rotated channels per head by transformers' config; None if it does not give one for all layers.

    Some classes do not read what their config says, so this is compared with what they do.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get(FACTOR)
    if not isinstance(factor, float) or rope.get("rope_type") == "proportional":
        return None
    return int(_head_size(config) * factor)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _hand_on_dense_layers(config: Mapping[str, Any], made: Any) -> None:
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
            CORRECT,
        )
    setattr(text, TYPES, meant)


def refusal(
    cls: Any, config: Mapping[str, Any], run: Callable[[Skeleton], object], failure: Exception, verb: str = "compute"
) -> ArchitectureError:
    """The refusal of a model after this failure, which names the keys of config.json that are to blame, if any are.

    Args:
        run: computes what failed, of a skeleton that can be made.
    """
    import transformers

    def works(changed: dict[str, Any]) -> bool:
        try:
            run(Skeleton(cls, config_of(cls, changed)))
        except (*FAILURES, ArchitectureError):
            return False
        return True

    keys = _culprits(config, config_class_of(cls, config)(), works)
    if isinstance(failure, ArchitectureError) and not keys:
        return failure
    wrong = " and ".join(f"{key} is {json.dumps(value)}" for key, value in keys.items())
    reason = f"({type(failure).__name__}: {' '.join(str(failure).split())})"
    problem = f"transformers {transformers.__version__} cannot {verb} {cls.__name__} of it {reason}"
    later = saved_with_later(config)
    saved = f"the model was saved with transformers {later[0]}: {later[1]}, or " if later else ""
    return ArchitectureError(wrong, problem, f"{saved}correct this file")


def _culprits(config: Mapping[str, Any], default: Any, works: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
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
