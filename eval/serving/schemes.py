"""A module's scheme: as a quantization_config declares it, and as its tensors are stored.

A matrix of known shape is packed integers (`weight_packed`, `weight_scale`), FP8 (`weight`, `weight_scale`) or plain
(`weight`); bits, group size and block follow from the shapes.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Stored
from quantizers.formats.fp8 import SCALE, SCALE_INV, blocks_of

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

SECTION = "quantization_config"
PACKED = "weight_packed"
ASYMMETRIC = ("weight_zero_point", "weight_g_idx")
Mistake = Literal[
    "no weight", "scale not renamed", "no scale", "not quantized", "not plain", "another scheme", "extra", "scale dtype"
]  # fmt: skip
Parts = Mapping[str, Stored]  # a module's tensors, by the last part of their names


class Refused(Exception):
    """An engine refuses a module or section; the message says why. A finding, not an error of this program."""


@dataclass(frozen=True)
class ServedScheme:
    """The scheme of a config group. Two are equal if engines treat them alike, whichever group they come from."""

    type: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool
    activations: str | None = None
    format: str = ""
    group: str = field(default="", compare=False)
    target: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = {"int": "INT", "float": "FP"}.get(self.type, self.type) + str(self.bits)
        if self.strategy == "block" and self.block:
            return f"{name} block {self.block[0]}x{self.block[1]}"
        return f"{name} group {self.group_size}" if self.strategy == "group" else f"{name} per {self.strategy}"

    @property
    def origin(self) -> str:
        """The group and target it comes from, for messages."""
        return f"group {self.group!r}, target {self.target!r}"


def scheme_of(weights: QuantizationArgs) -> ServedScheme:
    """The scheme of weights as compressed-tensors and vLLM hold it."""
    fields = weights.model_dump(mode="json")
    keys = ("type", "num_bits", "strategy", "group_size", "block_structure", "symmetric")
    kind, bits, strategy, group, block, symmetric = (fields[key] for key in keys)
    blocks = (block[0], block[1]) if block else None
    return ServedScheme(kind, bits, strategy, group, blocks, symmetric, bool(fields["dynamic"]))


# As declared -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """A parsed quantization_config.

    Attributes:
        targets: scheme by target, in file order; a repeated target keeps its first place and takes the later scheme.
        groups: each group's targets and scheme, in file order.
        ignore: names and expressions of modules that are not quantized.
        format: of the whole checkpoint.
    """

    targets: Mapping[str, ServedScheme]
    groups: tuple[tuple[tuple[str, ...], ServedScheme], ...]
    ignore: tuple[str, ...]
    format: str


def read_rules(section: Mapping[str, Any]) -> Rules:
    """Parse a quantization_config, as tolerantly as the servers do.

    Raises:
        Refused: it does not have the structure that they need.
    """
    from compressed_tensors.quantization import QuantizationArgs

    default_format = str(section.get("format"))
    targets: dict[str, ServedScheme] = {}
    groups: list[tuple[tuple[str, ...], ServedScheme]] = []
    try:
        for name, group in section["config_groups"].items():
            activations = group.get("input_activations")
            scheme = replace(
                scheme_of(QuantizationArgs.model_validate(group["weights"])),
                activations=json.dumps(activations, sort_keys=True) if activations else None,
                format=group.get("format") or default_format,
                group=name,
            )
            targets |= {target: replace(scheme, target=target) for target in group["targets"]}
            groups.append((tuple(group["targets"]), scheme))
        ignore = tuple(section.get("ignore") or ())
        for pattern in (*targets, *ignore):
            if pattern.startswith("re:"):
                re.compile(pattern[3:])
    except re.error as failure:
        raise Refused(f"{failure.pattern!r} is not a regular expression ({failure.msg})") from None
    except (AttributeError, KeyError, TypeError, ValueError) as failure:  # pydantic's errors among them
        raise Refused(f"config_groups has an unexpected structure ({' '.join(str(failure).split())})") from None
    return Rules(targets, tuple(groups), ignore, default_format)


def validation_errors(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Key and message of every error of compressed-tensors' own QuantizationConfig."""
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    try:
        QuantizationConfig.model_validate(copy.deepcopy(dict(section)))
    except ValidationError as failure:
        # pydantic also tries a group as a list of targets, for a preset; that branch's message would mislead.
        errors = [(e["loc"], e["msg"]) for e in failure.errors() if "list[str]" not in e["loc"]]
        paths = ([str(part) for part in place if not str(part).startswith("function-")] for place, _ in errors)
        return [(".".join([SECTION, *path]), message) for path, (_, message) in zip(paths, errors, strict=True)]
    except (KeyError, TypeError, ValueError) as failure:
        return [(SECTION, str(failure).strip("'\""))]
    return []


# As stored ---------------------------------------------------------------------------------------------------------


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
    """The mistakes in these tensors under this scheme (None: not quantized): kind and one sentence each.

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
    needed = _required(scheme, shape)
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


def _required(scheme: ServedScheme, shape: tuple[int, ...]) -> Needed | None:
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
