"""Compares how a checkpoint's tensors are stored with the scheme under which an engine would read them.

Uses headers only: a matrix of known shape is packed integers (`weight_packed`, `weight_scale`), FP8 (`weight`,
`weight_scale`), or plain (`weight`); bits, group size and block follow from the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.fp8 import SCALE_INV
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Stored

from .config_groups import ServedScheme
from .readings import kind_of, module_of, mtp_matrices
from .rules import EMBEDDINGS, EXPERTS, HEAD, MTP_EXPERTS, MTP_LINEAR, MTP_OTHER, ROUTER

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


@dataclass(frozen=True)
class Module:
    """A published module that an engine may quantize: its kind, and its shape (outputs, inputs).

    An `optional` one is missing in some models of the family.
    """

    kind: str
    shape: tuple[int, ...]
    optional: bool = False


def by_module(tensors: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    """Group tensors by module, then by the last part of their names."""
    modules: dict[str, dict[str, Stored]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = info
    return modules


def expected_modules(facts: Architecture, sizes: Sizes) -> dict[str, Module]:
    """Every matrix that an engine may quantize, by its published name."""
    modules: dict[str, Module] = {}
    for layer in (*range(sizes["layers"]), *sizes.mtp):
        dense, mtp = layer in sizes.dense, layer in sizes.mtp
        for name, terms in (facts.mtp_linears() if mtp else facts.linears(dense)).items():
            modules[facts.layer(layer, name)] = Module(MTP_LINEAR if mtp else kind_of(name), sizes.shape(terms))
        if dense:
            continue
        tensors = facts.mtp_tensors() if mtp else facts.tensors(dense)
        for name in mtp_matrices(facts) if mtp else [facts.router.tensor]:
            module = Module(MTP_OTHER if mtp else ROUTER, sizes.shape(tensors[name].shape), tensors[name].optional)
            modules[module_of(facts.layer(layer, name))] = module
        for matrix in MATRICES:
            shape = sizes.shape(facts.expert_linears[matrix].shape)
            for expert in range(sizes["experts"]):
                modules[facts.expert(layer, expert, matrix)] = Module(MTP_EXPERTS if mtp else EXPERTS, shape)
    for kind, tensor in ((HEAD, facts.head), (EMBEDDINGS, facts.embedding)):
        modules[module_of(tensor)] = Module(kind, sizes.shape(facts.outside[tensor].shape))
    return modules


def expected_vectors(facts: Architecture, sizes: Sizes) -> list[str]:
    """The other tensors that must exist: norms, biases and the router's correction bias."""
    named = dict(facts.outside)
    for layer in (*range(sizes["layers"]), *sizes.mtp):
        own = facts.mtp_tensors() if layer in sizes.mtp else facts.tensors(layer in sizes.dense)
        named |= {facts.layer(layer, name): tensor for name, tensor in own.items()}
    return [name for name, tensor in named.items() if len(tensor.shape) == 1 and not tensor.optional]


def misnamed_experts(modules: Mapping[str, Parts], facts: Architecture, sizes: Sizes) -> dict[str, str]:
    """Expert modules stored under another naming than the family's: by module, the last part of its name."""
    own = {linear.name for linear in facts.expert_linears.values()}
    misnamed: dict[str, str] = {}
    for layer in (*sizes.moe_layers, *sizes.mtp):
        for expert in range(sizes["experts"]):
            prefix = facts.layer(layer, facts.expert_prefix.format(expert=expert))
            for other in (*PROJECTIONS.values(), "w1", "w3", "w2"):
                if other not in own and prefix + other in modules:
                    misnamed[prefix + other] = other
    return misnamed


def describe(parts: Parts, shape: tuple[int, ...]) -> str:
    """How a module is stored, worded like `str(ServedScheme)`."""
    scale = parts.get("weight_scale")
    if "weight_packed" in parts:
        bits = parts["weight_packed"].shape[-1] * 32 / shape[-1]
        name = f"INT{bits:g}"
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
        return "FP8 with weight_scale_inv" if SCALE_INV in parts else "FP8 without a scale"
    if math.prod(scale.shape) == 1 and math.prod(shape) > 128 * 128:
        return "FP8 per tensor"
    if scale.shape[0] == shape[0]:
        return "FP8 per channel"
    return f"FP8 block {'x'.join(str(_block(n, count)) for n, count in zip(shape, scale.shape, strict=False))}"


def _block(size: int, count: int) -> int:
    """The edge of a block: 128 if that gives `count` blocks, else the smallest edge that does."""
    return 128 if math.ceil(size / 128) == count else math.ceil(size / max(count, 1))


def mistakes(scheme: ServedScheme | None, parts: Parts, shape: tuple[int, ...]) -> list[tuple[Mistake, str]]:
    """What goes wrong if these tensors are read under this scheme (None: as not quantized).

    Returns:
        Kind of mistake and one sentence, for each. Schemes that this program never writes are not checked.
    """
    problems: list[tuple[Mistake, str]] = []
    if scheme is None or scheme.symmetric:
        problems += [("extra", f"{part} belongs to no symmetric scheme") for part in ASYMMETRIC if part in parts]
    if "weight_packed" in parts and "weight" in parts:
        problems.append(("extra", "weight lies beside weight_packed"))
    if "weight_packed" not in parts and "weight" not in parts:
        return [*problems, ("no weight", "neither weight nor weight_packed is there")]
    if SCALE_INV in parts and "weight_scale" not in parts:
        return [*problems, ("scale not renamed", "the FP8 scale is called weight_scale_inv; it must be weight_scale")]
    quantized = "weight_packed" in parts or "weight_scale" in parts or parts["weight"].dtype not in FLOATING
    if scheme is None:
        if quantized:
            text = f"no group matches: it is taken as not quantized, but is stored as {describe(parts, shape)}"
            problems.append(("not quantized", text))
        return problems
    mistake: Mistake | None = "another scheme"
    needed = required(scheme, shape)
    if not quantized:
        mistake = "not plain"
    elif needed is None:
        mistake = None
    elif needed.keys() <= parts.keys() and _fit(parts, needed):
        mistake = None
        if "weight_packed" in parts and parts["weight_scale"].dtype != "BF16":
            problems.append(("scale dtype", f"the scale is {parts['weight_scale'].dtype}, not BF16"))
    elif "weight_scale" not in parts and next(iter(needed)) in parts and _fit(parts, needed):
        return [*problems, ("no scale", f"weight_scale is missing: stored as {describe(parts, shape)}")]
    if mistake:
        takes = f"takes the scheme {scheme} ({scheme.origin}), but is stored as {describe(parts, shape)}"
        problems.append((mistake, takes))
    return problems


@dataclass(frozen=True)
class Needed:
    """Dtypes and shape that a tensor must have."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def holds(self, info: Stored) -> bool:
        """Whether a tensor has them."""
        return info.dtype in self.dtypes and tuple(info.shape) == self.shape


def _fit(parts: Parts, needed: Mapping[str, Needed]) -> bool:
    """Whether all those tensors of a scheme that exist are as it needs them."""
    return all(need.holds(parts[part]) for part, need in needed.items() if part in parts)


def required(scheme: ServedScheme, shape: tuple[int, ...]) -> dict[str, Needed] | None:
    """The tensors that a scheme needs for a matrix, weight first; None for schemes that this program never writes."""
    rows, columns = shape
    if scheme.type == "int" and scheme.strategy == "group" and scheme.group_size and not scheme.activations:
        return {
            "weight_packed": Needed(("I32",), (rows, math.ceil(columns * scheme.bits / 32))),
            "weight_scale": Needed(FLOATING, (rows, columns // scheme.group_size)),
        }
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy == "block" and scheme.block:
        blocks = (math.ceil(rows / scheme.block[0]), math.ceil(columns / scheme.block[1]))
        return {"weight": Needed((FP8,), shape), "weight_scale": Needed(FLOATING, blocks)}
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy == "channel":
        return {"weight": Needed((FP8,), shape), "weight_scale": Needed(FLOATING, (rows, 1))}
    return None
