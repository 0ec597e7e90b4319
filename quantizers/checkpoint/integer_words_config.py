"""What the quantization_config of AutoAWQ, GPTQ and AutoRound says about the integers in integer_words.py.

    quant_method  layout                                              exceptions for single modules
    awq           version: gemm
    gptq          checkpoint_format: gptq (the first version), gptq_v2   dynamic: expressions, `-:` for those left out
    auto-round    packing_format: one of AUTO_ROUND                   extra_config: names, or expressions

Keys as AutoAWQ 0.2, AutoGPTQ 0.7, GPTQModel 5 and AutoRound 0.15 write them. Exceptions are found by the rules of
GPTQModel (`re.match`, the first that matches) and AutoRound (the module's name, then `re.search` of each key that has
a special character); vLLM's are the same.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantizers.system.errors import CheckpointError

Layout = Literal["awq", "gptq"]
# The layouts by the names that each method has for them, and what their zero points lack.
AWQ: dict[object, tuple[Layout, int]] = {"gemm": ("awq", 0)}
GPTQ: dict[object, tuple[Layout, int]] = {"gptq": ("gptq", 1), "gptq_v2": ("gptq", 0)}
AUTO_ROUND: dict[object, tuple[Layout, int]] = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1),
    "auto_round:gptqmodel": ("gptq", 0), "auto_round": ("gptq", 0),
    "auto_round:auto_awq": ("awq", 0), "auto_round:awq": ("awq", 0),
}  # fmt: skip
# By method: the keys that may hold that name, the names, and the one that holds if there is no key.
METHODS: dict[str, tuple[tuple[str, ...], dict[object, tuple[Layout, int]], str]] = {
    "awq": (("version", "checkpoint_format", "format"), AWQ, "gemm"),
    "gptq": (("checkpoint_format", "format"), GPTQ, "gptq"),
    "auto-round": (("packing_format",), AUTO_ROUND, "auto_round:auto_gptq"),
}
BITS: dict[Layout, tuple[int, ...]] = {"awq": (4,), "gptq": (4, 8)}
PLAIN_BITS = 16  # AutoRound's word for a module that is not quantized
SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")


@dataclass(frozen=True)
class Words:
    """How a checkpoint's integers are stored.

    Attributes:
        layout: how words are filled.
        missing: what a stored zero point lacks: 1 in the first version of GPTQ.
        bits, group: of a module without an exception; a group of -1 is a whole column.
        in_order: whether the section promises that inputs are in their groups' order (`desc_act: false`).
        exceptions: by expression, the keys that differ in the modules it matches from their start; None: those are
            not quantized.
    """

    layout: Layout
    missing: int
    bits: int
    group: int
    in_order: bool
    exceptions: tuple[tuple[str, Mapping[str, Any] | None], ...] = ()

    def of(self, module: str) -> tuple[int, int] | None:
        """Bits and group size of a module; None if the section says that it is not quantized."""
        for pattern, keys in self.exceptions:
            if re.match(pattern, module):
                return None if keys is None else (keys.get("bits", self.bits), keys.get("group_size", self.group))
        return self.bits, self.group


def has_words(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that a checkpoint holds such integers."""
    section = config.get("quantization_config")
    return isinstance(section, Mapping) and section.get("quant_method") in METHODS


def read_words(section: Mapping[str, Any], where: str) -> Words:
    """Read a quantization_config whose quant_method is one of METHODS.

    Args:
        where: its file and key, for messages.

    Raises:
        CheckpointError: one line that names the key that cannot be honoured.
    """
    layout, missing = _layout(section, where)
    bits_key, group_key = (
        new if new in section else old for new, old in (("w_bit", "bits"), ("q_group_size", "group_size"))
    )
    bits, group = section.get(bits_key), section.get(group_key)
    if type(bits) is not int or bits not in BITS[layout]:
        raise _refused(section, where, bits_key, " or ".join(map(str, BITS[layout])))
    if type(group) is not int or not _is_group(group):
        raise _refused(section, where, group_key, "a positive number or -1")
    for key, only in (("pack_dtype", "int32"), ("data_type", "int")):
        if section.get(key, only) != only:
            raise _refused(section, where, key, only)
    for key in ("adapter", "lora"):
        if section.get(key):
            raise _refused(section, where, key, "a checkpoint without one")
    in_order = section["quant_method"] == "gptq" and section.get("desc_act") is False
    return Words(layout, missing, bits, group, in_order, tuple(_exceptions(section, where, layout)))


def _refused(section: Mapping[str, Any], where: str, key: str, only: str) -> CheckpointError:
    return CheckpointError(f"{where}.{key} is {reprlib.repr(section.get(key))}; only {only} can be read here")


def _is_group(size: int) -> bool:
    return size == -1 or size > 0


def _layout(section: Mapping[str, Any], where: str) -> tuple[Layout, int]:
    if section.get("is_marlin_format"):  # AutoGPTQ's, which names no checkpoint_format
        raise _refused(section, where, "is_marlin_format", "the format gptq")
    keys, known, default = METHODS[section["quant_method"]]
    key = next((key for key in keys if section.get(key) is not None), keys[0])
    named = section.get(key, default)
    name = named.lower() if isinstance(named, str) else None  # AutoAWQ has written GEMM too
    if name not in known:
        raise CheckpointError(
            f"{where}.{key} is {reprlib.repr(named)}, which fills its words in another way; only "
            f"{' or '.join(map(str, known))} can be read here, so give the checkpoint saved in that"
        )
    return known[name]


def _exceptions(
    section: Mapping[str, Any], where: str, layout: Layout
) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    for key in ("dynamic", "extra_config"):
        given = section.get(key) or {}
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{where}.{key} is {reprlib.repr(given)}; an object is needed")
        found = []
        for name, keys in given.items():
            at = f"{where}.{key}[{reprlib.repr(name)}]"
            left_out = key == "dynamic" and name.startswith("-:")
            found.append((name, None if left_out or keys is False else _exception(keys, at, layout)))
        if key == "dynamic":
            found = [(name.removeprefix("-:").removeprefix("+:"), keys) for name, keys in found]
        else:
            names = [(rf"{re.escape(name)}\Z", keys) for name, keys in found]
            found = [*names, *((f".*?(?:{name})", keys) for name, keys in found if SPECIAL.search(name))]
        for pattern, keys in found:
            try:
                re.compile(pattern)
            except re.error as failure:
                message = f"{where}.{key}: {reprlib.repr(pattern)} is not a regular expression ({failure.msg})"
                raise CheckpointError(message) from None
            yield pattern, keys


def _exception(keys: Any, at: str, layout: Layout) -> Mapping[str, Any] | None:
    """The keys of an exception, checked; None if its modules are not quantized."""
    if not isinstance(keys, Mapping):
        raise CheckpointError(f"{at} is {reprlib.repr(keys)}; an object is needed")
    bits, group = keys.get("bits", BITS[layout][0]), keys.get("group_size", -1)
    if type(bits) is int and bits >= PLAIN_BITS:
        return None
    if type(bits) is not int or bits not in BITS[layout] or type(group) is not int or not _is_group(group):
        raise CheckpointError(
            f"{at} is {reprlib.repr(keys)}; only {' or '.join(map(str, BITS[layout]))} bits can be read here"
        )
    for key, only in (("data_type", "int"), ("adapter", None), ("lora", None)):
        if keys.get(key, only) != only:
            raise CheckpointError(
                f"{at}: {key} is {reprlib.repr(keys[key])}; only integers without an adapter can be read here"
            )
    return keys
