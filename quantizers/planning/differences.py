"""How a checkpoint's headers differ from what the facts of its family expect: all differences, by kind of tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import FP8, Spec

from .assign_actions import expected_tensors, mtp_layers
from .fit_sizes import numbered
from .plan import kind_of_tensor

Section = tuple[str, ...]  # keys that lead to a part of the facts, such as ("every_layer", "tensors")
OUTSIDE: Section = ("outside",)
MATRICES_OF_EXPERTS: Section = ("expert_linears",)
TENSORS, LINEARS = "tensors", "linears"
EVERY, MOE, DENSE, MTP = "every_layer", "moe_layer", "dense_layer", "mtp_layer"
SCALE = "_scale_inv"
SCALES = (f".weight{SCALE}", ".weight_scale")  # with a scale per block, and per row


@dataclass(frozen=True)
class Difference:
    """One way in which a checkpoint differs from the built-in facts.

    Attributes:
        what: `family`, `size`, `assert`, `missing`, `unknown`, `shape`, `dtype` or `scales`.
        name: a key, or a kind of tensor.
        kept, found: in the built-in facts, and in the checkpoint.
        written: what the new facts say; None if facts have no words for it, so that it is still refused.
        tensors: how many tensors it is about; 0 for a key.
    """

    what: str
    name: str
    kept: str
    found: str
    written: str | None
    tensors: int = 0


@dataclass
class Kind:
    """An entry of the facts, the tensors that it means, and what the checkpoint has of them.

    Attributes:
        section, name: where the entry is.
        kind: the tensors' name with `*` for numbers.
        expected: of each of them.
        found: of those that are there.
        numbers: how many of them have which spec; None counts those that are missing.
    """

    section: Section
    name: str
    kind: str
    expected: Spec
    numbers: Counter[Spec | None] = field(default_factory=Counter)

    @property
    def found(self) -> list[Spec]:
        """The different specs of those that are there."""
        return [spec for spec in self.numbers if spec is not None]

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        return {spec.shape for spec in self.found}

    @property
    def dtypes(self) -> set[str]:
        return {spec.dtype for spec in self.found}

    @property
    def missing(self) -> int:
        return self.numbers[None]


@dataclass(frozen=True)
class Compared:
    """A checkpoint's tensors beside those that the facts expect.

    Attributes:
        kinds: every entry of the facts.
        scales: the same of the scales of its FP8 matrices; their entries are those of the matrices.
        unknown: the tensors that no entry means.
    """

    kinds: list[Kind]
    scales: list[Kind]
    unknown: dict[str, Spec]


def compare(
    facts: Architecture, sizes: Sizes, config: Mapping[str, Any], tensors: Mapping[str, Spec], where: str
) -> Compared:
    """Sort every tensor under the entry that means it.

    Args:
        config: config.json, which says whether linear modules are published in FP8.
        tensors: every header.
        where: the checkpoint's name, for messages.
    """
    plain = expected_tensors(facts, sizes, config, where)
    section = config.get("quantization_config") or {"quant_method": "fp8"}
    in_fp8 = expected_tensors(facts, sizes, {**config, "quantization_config": section}, where)
    kinds: dict[tuple[Section, str], Kind] = {}
    scales: dict[tuple[Section, str], Kind] = {}
    known = set()
    absent = set(sizes.mtp) - set(mtp_layers(facts, sizes, tensors))
    left_out = tuple(facts.layer(layer, "") for layer in absent)
    for name, spec in in_fp8.items():
        if name.startswith(left_out):
            continue
        is_scale = name.endswith(SCALES)
        if is_scale:  # which only a matrix in FP8 has, whatever config.json says
            weight = tensors.get(_weight_of(name))
            if weight is None or weight.dtype != FP8:
                continue
        known.add(name)
        section, entry = entry_of(facts, sizes, _weight_of(name))
        if section[-1] == TENSORS and name not in tensors and _optional(facts, entry):
            continue
        table, kind = (scales if is_scale else kinds), kind_of_tensor(name)
        if (section, kind) not in table:
            table[section, kind] = Kind(section, entry, kind, spec if is_scale else plain[name])
        table[section, kind].numbers[tensors.get(name)] += 1
    unknown = {name: spec for name, spec in tensors.items() if name not in known and not facts.is_unread(name)}
    return Compared(list(kinds.values()), list(scales.values()), unknown)


def _weight_of(name: str) -> str:
    """The weight that a scale belongs to; any other name as it is."""
    return name.rpartition("_scale")[0] if name.endswith(SCALES) else name


def _optional(facts: Architecture, name: str) -> bool:
    layers = [
        facts.tensors(dense=False),
        facts.tensors(dense=True),
        *([facts.mtp_tensors()] if facts.mtp_layer else []),
    ]
    return any(name in tensors and tensors[name].optional for tensors in layers)


def entry_of(facts: Architecture, sizes: Sizes, tensor: str) -> tuple[Section, str]:
    """Where the entry of the facts is that means a tensor which they expect, and its name."""
    place = numbered(facts.layer_prefix, "layer").match(tensor)
    if tensor in facts.outside or place is None:
        return OUTSIDE, tensor
    within = tensor[place.end() :]
    module = within.removesuffix(".weight")
    number = int(place[1])
    own = (DENSE, facts.dense_layer) if number in sizes.dense else (MOE, facts.moe_layer)
    further = (MTP, facts.mtp_layer if number in sizes.mtp else None)
    for key, layer in (
        further,
        own,
        (EVERY, facts.every_layer),
    ):  # what a kind of layer says comes before what all have
        if layer and within in layer.tensors:
            return (key, TENSORS), within
        if layer and module in layer.linears:
            return (key, LINEARS), module
    return MATRICES_OF_EXPERTS, next(m for m in MATRICES if module.endswith(f".{facts.expert_linears[m].name}"))


def part(values: MutableMapping[str, Any], section: Section) -> MutableMapping[str, Any]:
    """A section of facts as in YAML, to be changed; made where there is none."""
    for key in section:
        values = values.setdefault(key, {})
    return values


def shown(specs: Iterable[Spec | None]) -> str:
    """Specs as text: `BF16 [5, 7]`, several with commas."""
    return ", ".join(sorted("nothing" if spec is None else f"{spec.dtype} {list(spec.shape)}" for spec in specs))
