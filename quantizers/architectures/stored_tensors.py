"""The tensors of a checkpoint by what the model does with them, found by transformers' own rules for loading."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

from quantizers.system.errors import ArchitectureError

from .skeleton import FAILURES, NOT_QUANTIZED, Place, Skeleton

SCALES = ("_scale_inv", "_scale")  # what follows the name of an FP8 weight in that of its scale
EXPERT = re.compile(r"(\.experts\.)(\d+)(\.)")
OF_ALL_EXPERTS = re.compile(r"\.(gate_up_proj|down_proj)$|experts\.up_proj$")


class Header(NamedTuple):
    """The header entry of a stored tensor: dtype as safetensors calls it, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint by what the model does with them; the scales of FP8 weights go with these."""

    headers: Mapping[str, Header]  # of all
    prefix: str  # of the names of a decoder layer's tensors, before the layer's number
    layers: list[dict[str, Place]]  # for each decoder layer its tensors: their names without the prefix, and places
    outside: dict[str, Place]  # names and places of those outside the layers that the model computes with
    carried: list[str]  # the names of all others
    converted: dict[str, list[str]]  # parameters within a layer that are made of other tensors, with their names

    def header(self, layer: int, name: str) -> Header:
        """The header entry of a tensor of a layer, by its name without the prefix."""
        return self.headers[f"{self.prefix}{layer}.{name}"]

    @cached_property
    def _published(self) -> dict[str, tuple[str, int]]:
        """For each parameter within a layer: the name of its tensor, and the first layer that has it."""
        published: dict[str, tuple[str, int]] = {}
        for number, names in enumerate(self.layers):
            for name, place in names.items():
                published.setdefault(place.parameter, (name, number))
        for parameter, (first, *_) in self.converted.items():
            published.setdefault(parameter, (first, next(n for n, here in enumerate(self.layers) if first in here)))
        return published

    def published(self, path: str) -> str:
        """The stored name of a parameter, or of a module with a weight, within a layer; other words as they are."""
        if path in self._published:
            return self._published[path][0]
        weight = self._published.get(f"{path}.weight")
        return weight[0].removesuffix(".weight") if weight else path

    def modules(self, paths: Sequence[str]) -> list[str]:
        """The stored names of modules with a weight within a layer, of a converted one those of all parts."""
        names = (self.converted.get(f"{path}.weight", [self.published(path)]) for path in paths)
        return [name.removesuffix(".weight") for parts in names for name in parts]

    def dtype(self, parameter: str) -> str:
        """The stored dtype of a parameter within a layer."""
        name, number = self._published[parameter]
        return self.header(number, name).dtype

    def renamed(self) -> dict[str, str]:
        """The stored names of parameters, and of modules with a weight, that are not transformers'."""
        places = [entry for names in self.layers for entry in names.items()]
        differ = {name: place.parameter for name, place in places if place.part is None and name != place.parameter}
        modules = {
            name.removesuffix(".weight"): parameter.removesuffix(".weight")
            for name, parameter in differ.items()
            if name.endswith(".weight") and parameter.endswith(".weight")
        }
        return differ | modules

    @property
    def strangers(self) -> list[str]:
        """Tensors in decoder layers, without the prefix, that no text goes through; servers may know them.

        Of several experts those of one.
        """
        within = re.compile(re.escape(self.prefix) + r"(\d+)\.(.+)")
        matches = [match for name in self.carried if (match := within.fullmatch(name))]
        names = {match[2] for match in matches if int(match[1]) < len(self.layers)}
        backwards = sorted(names, key=lambda name: (len(name), name), reverse=True)
        return sorted({EXPERT.sub("", f".{name}"): name for name in backwards}.values())


def sort_out(
    skeleton: Skeleton, headers: Mapping[str, Header], idle: Collection[str] = (), experts: int | None = None
) -> StoredTensors:
    """Every stored tensor with its place; `idle` are the parameters of other experts, which no text goes through.

    Of `experts` with matrices, if given, others follow without, for which transformers writes numbers nevertheless.

    Raises:
        ArchitectureError: the names of a layer's tensors do not begin alike, two tensors are the same parameter, or
            transformers cannot convert them.
    """
    layers: list[dict[str, Place]] = [{} for _ in skeleton.layers]
    outside: dict[str, Place] = {}
    carried: list[str] = []
    prefixes: set[str] = set()
    whole: dict[Place, str] = {}  # the tensor that alone is a parameter
    needed = needed_outside(skeleton)
    place_of = cache(skeleton.place)  # of the first expert: all others lie beside it
    other_experts = _other_experts(skeleton, headers) if idle else set()
    for name in headers:
        weight = _weight_of(name, headers)
        place = place_of(EXPERT.sub(r"\g<1>0\3", weight))
        expert = EXPERT.search(weight)
        if (
            place is None
            or (place.layer is None and place.parameter not in needed)
            or place.parameter in idle
            or (expert is not None and int(expert[2]) in other_experts)
            or (expert is not None and experts is not None and int(expert[2]) >= experts)
        ):
            carried.append(name)
            continue
        if weight != name:
            continue
        if place.part is None and expert is None and whole.setdefault(place, name) != name:
            raise ArchitectureError(
                "", f"the files hold {whole[place]} and {name}, which transformers loads as one parameter", "keep one"
            )
        if place.layer is None:
            outside[name] = place
        else:
            start, _, within = name.partition(f".{place.layer}.")
            prefixes.add(f"{start}.")
            layers[place.layer][within] = place
    if len(prefixes) != 1:
        raise ArchitectureError(
            "",
            f"the tensors of its layers begin with {' and '.join(sorted(prefixes)) or 'nothing known'}; "
            f"{skeleton.name} needs one beginning",
            "give the published checkpoint",
        )
    prefix, order = prefixes.pop(), {name: number for number, name in enumerate(skeleton.parameters)}

    def in_order(names: Mapping[str, Place], path: str = "") -> dict[str, Place]:
        """As the class has the parameters, whatever the order in the files."""
        return dict(sorted(names.items(), key=lambda entry: order[path + entry[1].parameter]))

    layers = [in_order(names, f"{skeleton.path}.{number}.") for number, names in enumerate(layers)]
    converted = _converted(skeleton, headers, prefix, layers)
    return StoredTensors(headers, prefix, layers, in_order(outside), carried, converted)


def _converted(
    skeleton: Skeleton, headers: Mapping[str, Header], prefix: str, layers: Sequence[Mapping[str, Place]]
) -> dict[str, list[str]]:
    """The parameters besides those of all experts that transformers makes of other tensors, with the names of these."""
    result: dict[str, list[str]] = {}
    for number, names in enumerate(layers):
        groups: dict[str, list[str]] = {}
        for name, place in names.items():
            if place.part is not None and not OF_ALL_EXPERTS.search(place.parameter):
                groups.setdefault(place.parameter, []).append(name)
        for parts in groups.values():
            full = [f"{prefix}{number}.{name}" for name in parts]
            made, reason = dict[str, torch.Tensor](), "they have other shapes"
            try:
                made = skeleton.convert({name: torch.empty(headers[name].shape, device="meta") for name in full})
            except FAILURES as failure:
                reason = " ".join(str(failure).split())
            wrong = [name for name, tensor in made.items() if tensor.shape != skeleton.parameters[name].shape]
            if wrong or not made:
                shapes = ", ".join(f"{name} {list(headers[name].shape)}" for name in full)
                raise ArchitectureError(
                    "",
                    f"transformers cannot make the parameters of {skeleton.name} of {shapes} ({reason})",
                    "the files are incomplete, or of another model than config.json says",
                )
            result |= {name.removeprefix(f"{skeleton.path}.{number}."): parts for name in made}
    return result


def _other_experts(skeleton: Skeleton, headers: Mapping[str, Header]) -> set[int]:
    """The numbers under which experts are stored that are none of the first set, in a model with several sets.

    A tensor with its number stands for each of an expert's: transformers' conversion says where it goes.
    """
    expert_tensor = next((name for name in headers if EXPERT.search(name)), None)
    if expert_tensor is None:  # all of a layer in one tensor, another for the other experts
        return set()
    layer = expert_tensor[: expert_tensor.index(".experts.")]
    numbers = {name: int(expert[2]) for name in headers if name.startswith(layer) and (expert := EXPERT.search(name))}
    marks = {name: torch.full((1, 1), float(number)) for name, number in numbers.items()}
    made = skeleton.convert({name: mark for name, mark in marks.items() if _weight_of(name, headers) == name})
    place = skeleton.place(EXPERT.sub(r"\g<1>0\3", expert_tensor))
    assert place is not None
    first = made[f"{skeleton.path}.{place.layer}.{place.parameter}"]
    if not torch.equal(first, torch.arange(len(first)).view(-1, 1, 1).expand_as(first).float()):
        raise ArchitectureError(
            f"{layer}.experts",
            f"{skeleton.name} sends a text through experts that are not stored as the first ones",
            NOT_QUANTIZED,
        )
    return set(numbers.values()) - set(range(len(first)))


def _weight_of(name: str, headers: Collection[str]) -> str:
    """The weight that a tensor is the scale of; its own name if it is none."""
    weights = (name.removesuffix(suffix) for suffix in SCALES if name.endswith(suffix))
    return next((weight for weight in weights if weight in headers), name)


def needed_outside(skeleton: Skeleton) -> set[str]:
    """The parameters outside the layers that a text goes through: those beside the layers, and the head."""
    siblings = skeleton.path.rpartition(".")[0] + "."
    head = parameter_of(skeleton, skeleton.head).removesuffix("weight")
    layers = skeleton.path + "."
    return {name for name in skeleton.parameters if name.startswith((siblings, head)) and not name.startswith(layers)}


def parameter_of(skeleton: Skeleton, module: torch.nn.Module) -> str:
    """The name of a module's weight in the whole model."""
    return next(f"{path}.weight" for path, other in skeleton.model.named_modules() if other is module)


def tied_parameters(skeleton: Skeleton) -> set[str]:
    """The parameters that are another one as well, so that files may lack them: a head that is the embeddings."""
    return set(getattr(skeleton.model, "all_tied_weights_keys", None) or ())


def require_complete(skeleton: Skeleton, stored: StoredTensors, idle: Collection[str]) -> None:
    """Refuse files without a tensor that the model computes with, as it does not with `idle` parameters of a layer."""
    there = {place.parameter for place in stored.outside.values()} | tied_parameters(skeleton)
    missing = sorted(needed_outside(skeleton) - there)
    for number, layer in enumerate(skeleton.layers):
        here = stored.layers[number]
        given = {place.parameter for place in here.values()} | set(idle)
        given |= {name for name, parts in stored.converted.items() if here.keys() >= set(parts)}
        missing += [f"{skeleton.path}.{number}.{name}" for name in layer.state_dict() if name not in given]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ArchitectureError(
            "",
            f"{skeleton.name} computes with {missing[0]}{more}, but no tensor in the files is that",
            "the files are incomplete, or of another model than config.json says",
        )


def refuse_more_layers(skeleton: Skeleton, stored: StoredTensors) -> None:
    """Refuse files with a further layer that has all that a decoder layer has, and nothing else.

    Layers that predict further tokens have tensors besides, and pass through unread.
    """
    within = re.compile(re.escape(stored.prefix) + r"(\d+)\.(.+)")
    further: dict[int, set[str]] = {}
    for name in stored.carried:
        if (match := within.fullmatch(name)) and int(match[1]) >= len(stored.layers):
            further.setdefault(int(match[1]), set()).add(match[2])
    for number, names in further.items():
        weights = {name for name in names if _weight_of(name, names) == name}
        if any(weights == layer.keys() for layer in stored.layers):
            raise ArchitectureError(
                "",
                f"num_hidden_layers means {len(stored.layers)} layers, but the files hold layer {number} "
                f"({stored.prefix}{number}), complete as the others",
                "correct the key, or remove what is not meant",
            )
