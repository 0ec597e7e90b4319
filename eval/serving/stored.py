"""How a module is stored, from the headers, and whether that fits the scheme under which an engine reads it.

A matrix of known shape is packed integers (`weight_packed`, `weight_scale`), FP8 (`weight`, `weight_scale`) or plain
(`weight`); bits, group size and block follow from the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Stored
from quantizers.formats.fp8 import SCALE, SCALE_INV, blocks_of

from .config import ServedScheme

PACKED = "weight_packed"
ASYMMETRIC = ("weight_zero_point", "weight_g_idx")
Mistake = Literal[
    "no weight",
    "scale not renamed",
    "no scale",
    "not quantized",
    "not plain",
    "another scheme",
    "extra",
    "scale dtype",
]
Parts = Mapping[str, Stored]  # a module's tensors, by the last part of their names


def by_module(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    """Tensors by module, then by the last part of their names."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = info
    return modules


def describe(parts: Parts, shape: tuple[int, ...]) -> str:
    """How a module is stored, in the words of `str(ServedScheme)`."""
    scale = parts.get(SCALE)
    if PACKED in parts:
        name = f"INT{parts[PACKED].shape[-1] * 32 / shape[-1]:g}"
        if scale is None:
            return f"{name} without a scale"
        if len(scale.shape) < 2 or not scale.shape[-1]:
            return f"{name} with a scale of shape {list(scale.shape)}"
        return f"{name} group {shape[-1] // scale.shape[-1]}"
    if "weight" not in parts:
        return "no weight"
    dtype = parts["weight"].dtype
    if dtype != FP8:
        return dtype if scale is None else f"{dtype} with a scale"
    if scale is None:
        return f"FP8 with {SCALE_INV}" if SCALE_INV in parts else "FP8 without a scale"
    if math.prod(scale.shape) == 1 and math.prod(shape) > 128 * 128:
        return "FP8 per tensor"
    if scale.shape[0] == shape[0]:
        return "FP8 per channel"
    return f"FP8 block {'x'.join(str(_block(n, count)) for n, count in zip(shape, scale.shape, strict=False))}"


def _block(size: int, count: int) -> int:
    """The edge of a block: 128 if that gives `count` blocks, else the smallest edge that does."""
    return 128 if math.ceil(size / 128) == count else math.ceil(size / max(count, 1))


def mistakes(scheme: ServedScheme | None, parts: Parts, shape: tuple[int, ...]) -> list[tuple[Mistake, str]]:
    """The consequences of reading these tensors under this scheme (None: not quantized): kind and one sentence each.

    Schemes that this program never writes are not checked.
    """
    problems: list[tuple[Mistake, str]] = []
    if scheme is None or scheme.symmetric:
        problems += [("extra", f"{part} belongs to no symmetric scheme") for part in ASYMMETRIC if part in parts]
    if PACKED in parts and "weight" in parts:
        problems.append(("extra", f"weight and {PACKED} are both present"))
    if PACKED not in parts and "weight" not in parts:
        return [*problems, ("no weight", f"neither weight nor {PACKED} is present")]
    if SCALE_INV in parts and SCALE not in parts:
        return [*problems, ("scale not renamed", f"the FP8 scale is called {SCALE_INV}; it must be {SCALE}")]
    quantized = PACKED in parts or SCALE in parts or parts["weight"].dtype not in FLOATING
    stored = describe(parts, shape)
    if scheme is None:
        text = f"no group matches: it is taken as not quantized, but is stored as {stored}"
        return [*problems, ("not quantized", text)] if quantized else problems
    takes = f"takes the scheme {scheme} ({scheme.origin}), but is stored as {stored}"
    if not quantized:
        return [*problems, ("not plain", takes)]
    needed = required(scheme, shape)
    if needed is None:
        return problems
    fits = all(parts[part].dtype in dtypes and tuple(parts[part].shape) == size
               for part, (dtypes, size) in needed.items() if part in parts)  # fmt: skip
    if not fits or next(iter(needed)) not in parts:
        return [*problems, ("another scheme", takes)]
    if SCALE not in parts:
        return [*problems, ("no scale", f"{SCALE} is missing: stored as {stored}")]
    if PACKED in parts and parts[SCALE].dtype != "BF16":
        problems.append(("scale dtype", f"the scale is {parts[SCALE].dtype}, not BF16"))
    return problems


Needed = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # dtypes and shape, by the last part of a tensor's name


def required(scheme: ServedScheme, shape: tuple[int, ...]) -> Needed | None:
    """The tensors that a scheme needs for a matrix, weight first; None for schemes that this program never writes."""
    rows, columns = shape
    if scheme.type == "int" and scheme.strategy == "group" and scheme.group_size and not scheme.activations:
        packed = (rows, math.ceil(columns * scheme.bits / 32))
        return {PACKED: (("I32",), packed), SCALE: (FLOATING, (rows, columns // scheme.group_size))}
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy == "block" and scheme.block:
        return {"weight": ((FP8,), shape), SCALE: (FLOATING, blocks_of(shape, scheme.block))}
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy == "channel":
        return {"weight": ((FP8,), shape), SCALE: (FLOATING, (rows, 1))}
    return None
