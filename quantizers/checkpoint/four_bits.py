"""Tells from config.json that a model already has 4-bit weights, so that it cannot be the source of a run.

    gpt-oss                      quantization_config.quant_method: mxfp4
    Kimi-K2-Thinking and later   a config group of compressed-tensors whose weights have num_bits: 4
    DeepSeek-V4                  expert_dtype: fp4
    GPTQ, AWQ, AutoRound         quantization_config.bits: 4
    NVFP4, bitsandbytes          quant_algo: NVFP4, load_in_4bit: true

The weights in such a model are already rounded: quantized again they would only become worse. Candidates of `verify`,
`eval` and `stitch` are such models themselves, so they are not checked.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.system.errors import CheckpointError

from .safetensors_header import printed

SECTION = "quantization_config"
FORMATS = ("quant_method", "quant_algo", "format", "fmt")
BITS = ("bits", "w_bit", "num_bits")
SWITCHES = ("load_in_4bit", "_load_in_4bit")
DTYPE = re.compile(r"(torch_|.*(expert|weight).*)?dtype")  # not those of the KV cache or of activations
NAME = re.compile(r"(fp|float|int|nf|w)_?4(?!\d)", re.IGNORECASE)  # mxfp4, NVFP4, float4_e2m1, int4, W4A16, nf4


def refuse_four_bits(config: Mapping[str, Any], where: str) -> None:
    """Refuse a source whose config.json says that its weights have 4 bits or fewer.

    Args:
        config: config.json, in which nothing is checked yet.
        where: its path, for the message.

    Raises:
        CheckpointError: one line that names the key.
    """
    sign = few_bits(config)
    if sign is not None:
        raise CheckpointError(
            f"{where}: {sign}: this model already has 4-bit weights, so there is nothing to quantize; give the model's "
            "FP8 or BF16 release"
        )


def few_bits(config: Mapping[str, Any]) -> str | None:
    """The first key of a config.json that says so, with its value; None if none does."""
    return next((f"{printed(key)} is {reprlib.repr(value)}" for key, value in _signs(config)), None)


def _signs(config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Every key that says so, with its value; those of a language model within another model (`text_config`) too."""
    for place, part in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(part, Mapping):
            yield from _named(part, place)
            section = part.get(SECTION)
            if isinstance(section, Mapping):
                yield from _in_section(section, f"{place}{SECTION}.")


def _in_section(section: Mapping[str, Any], place: str) -> Iterator[tuple[str, object]]:
    yield from _named(section, place)
    yield from ((place + key, section[key]) for key in FORMATS if _is_name(section.get(key)))
    yield from ((place + key, section[key]) for key in BITS if _is_few(section.get(key)))
    yield from ((place + key, True) for key in SWITCHES if section.get(key) is True)
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and _is_few(weights.get("num_bits")):
            yield f"{place}config_groups.{name}.weights.num_bits", weights["num_bits"]


def _named(part: Mapping[str, Any], place: str) -> Iterator[tuple[str, object]]:
    yield from ((place + key, value) for key, value in part.items() if DTYPE.fullmatch(key) and _is_name(value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME.search(value) is not None


def _is_few(value: object) -> bool:
    return type(value) is int and 1 <= value <= 4
