"""Contradictions within config.json: two statements of one fact that differ.

Programs differ in which of the two they read, so a model would be served as another than was measured. Such a pair is
refused: nobody but its publisher knows which is meant. The files settle whether embeddings are tied, see `untied`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.system.errors import ArchitectureError

from .whole_class import config_class_of

FACTOR = "partial_rotary_factor"  # the part of each head's channels that is rotated
ROTARY = ("", "rope_parameters", "rope_scaling")  # where config.json may have keys about rotary embeddings
TEXT = "text_config"  # the section about text in the config.json of a model with more than text
TIED = "tie_word_embeddings"
DTYPES = ("dtype", "torch_dtype")  # the newer name first
CORRECT = "correct one of the two"


def refuse_two_spellings(config: Mapping[str, Any], config_class: Any) -> None:
    """Refuse two spellings of one number whose values differ.

    These are keys about rotary embeddings (top level, `rope_parameters`, `rope_scaling`), and the two names of a key to
    which the class gives another (its `attribute_map`).

    Args:
        config: the content of config.json.
        config_class: transformers' class of it.

    Raises:
        ArchitectureError: names both keys and values.
    """
    text = config.get(TEXT)
    text_class = getattr(config_class, "sub_configs", {}).get(TEXT, config_class)
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) and text else config
    spellings = [*_rotary_spellings(inner), *_aliases(config, config_class)]
    if inner is not config:
        spellings += _aliases(inner, text_class, f"{TEXT}.")
    firsts: dict[str, tuple[str, Any]] = {}
    for fact, name, value in spellings:
        if value is None:
            continue
        first, before = firsts.setdefault(fact, (name, value))
        if before != value:
            raise ArchitectureError(
                "", f"{first} is {reprlib.repr(before)}, but {name} is {reprlib.repr(value)}", CORRECT
            )


def _rotary_spellings(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """The fact, key and value of each number about rotary embeddings."""
    for place in ROTARY:
        values: Any = config.get(place) if place else {key: config.get(key) for key in ("rope_theta", FACTOR)}
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if key != "type" or "rope_type" not in values:
                yield f"rope {'rope_type' if key == 'type' else key}", f"{place}.{key}".lstrip("."), value


def _aliases(config: Mapping[str, Any], config_class: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """The fact, key and value of each key that the class has two names for, where config.json has both."""
    for other, name in (getattr(config_class, "attribute_map", None) or {}).items():
        if other in config and name in config:
            yield f"{place}{name}", f"{place}{name}", config[name]
            yield f"{place}{name}", f"{place}{other}", config[other]


def refuse_another_type(config: Mapping[str, Any]) -> None:
    """Refuse a config.json whose `architectures` names a class of another model type than its `model_type`.

    Servers read the first, transformers' AutoModel the second. A type or a class that transformers does not have is not
    judged: published models such as Kimi-K2 name a class of DeepSeek's.

    Raises:
        ArchitectureError: names both.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names: Any = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    own: Any = getattr(getattr(transformers, name, None), "config_class", None)
    listed = CONFIG_MAPPING_NAMES.get(str(config.get("model_type")))
    meant: Any = getattr(transformers, listed, None) if listed else None
    if own is None or meant is None or config_class_of(getattr(transformers, name), config) is meant:
        return
    alike = issubclass(own, meant) or issubclass(meant, own)
    if not alike and own not in meant.sub_configs.values() and meant not in own.sub_configs.values():
        raise ArchitectureError(
            "",
            f"model_type is {config['model_type']!r}, but architectures names {name}, which is of {own.model_type!r}",
            CORRECT,
        )


def untied(config: Mapping[str, Any], model_class: Any) -> dict[str, Any]:
    """The keys of config.json to change so that nobody takes the embeddings for the head; none if nobody would.

    For files with a head of its own: transformers and vLLM compute with it whatever `tie_word_embeddings` says, and
    other servers drop it if that is true (huggingface/transformers#42612, vllm-project/vllm#6758).

    Args:
        model_class: transformers' class, whose config's default counts where the key is missing.
    """
    changes: dict[str, Any] = {}
    if config.get(TIED, getattr(model_class.config_class, TIED, False)):
        changes[TIED] = False
    text = config.get(TEXT)
    if isinstance(text, Mapping) and text.get(TIED):
        changes[TEXT] = {**text, TIED: False}
    return changes


def dtypes_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The dtypes in which config.json asks servers to compute, such as `bfloat16`, by key.

    transformers 5 reads the first, older versions `torch_dtype`, which some tools still write beside the other.
    """
    text = config.get(TEXT)
    for place in (config, text if isinstance(text, Mapping) else {}):
        given = {key: str(place[key]) for key in DTYPES if isinstance(place.get(key), str)}
        if given:
            return given
    return {}
