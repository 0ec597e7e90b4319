"""The architecture of a model without a file of facts: what its class in transformers and its stored tensors say.

Names come from transformers' own rules for loading, the roles of a layer's parts from probes (roles.py), and everything
else from the stored tensors. What a server calls its modules no class says: such a model's servers are not checked.
of_family.py lays what is known of seven families over what their classes say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from quantizers.system.errors import ArchitectureError

from .architecture import EXPERTS, ROUTER, Architecture
from .facts import HandedFacts, Stored
from .matrices import MATRICES, PROJECTIONS, Matrix
from .roles import EXACT, TOKENS, Roles, find_handed, kinds_of_layers, probe, require_usable
from .sizes import KEYS
from .skeleton import (
    FACTOR,
    FAILURES,
    Place,
    Skeleton,
    can_be_made,
    config_of,
    differing_arguments,
    model_class,
    rotated_channels,
)

INTEGERS = ("I32", "I64")  # numbers of something, such as of a table's rows
SCALES = ("_scale_inv", "_scale")  # what follows the name of an FP8 weight in that of its scale


def derived_architecture(config: dict[str, Any], tensors: Mapping[str, Stored], where: str) -> Architecture:
    """The facts about one model, from its config.json and the headers of its files.

    Args:
        config: config.json, with `architectures`.
        where: its path, for messages.

    Raises:
        ArchitectureError: transformers has no class for it; a tensor is missing, or is converted in a way that is not
            known here; or a probe refutes what every quantized model must fulfil.
    """
    headers = tuple(sorted((name, info.dtype, tuple(info.shape)) for name, info in tensors.items()))
    try:
        return _derived(json.dumps(config), headers)
    except ArchitectureError as failure:
        raise ArchitectureError(f"{where}: {failure}") from None


@cache  # a command asks several times, and building and probing the model takes seconds
def _derived(config: str, headers: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Architecture:
    parsed: dict[str, Any] = json.loads(config)
    skeleton = skeleton_of(parsed)
    handed = find_handed(skeleton)
    _require_length_alone(skeleton)
    kinds = [Kind(numbers, *probe(skeleton, numbers[0], handed)) for numbers in kinds_of_layers(skeleton)]
    roles = _common([kind.roles for kind in kinds if kind.roles is not None])
    require_usable(roles, parsed["model_type"])
    stored = sort_out(skeleton, {name: Header(dtype, shape) for name, dtype, shape in headers}, roles.idle)
    _require_complete(skeleton, stored, roles.idle)
    return Architecture.model_validate(described(parsed, skeleton, stored, kinds, roles, handed))


def described(
    parsed: Mapping[str, Any],
    skeleton: Skeleton,
    stored: StoredTensors,
    kinds: Sequence[Kind],
    roles: Roles,
    handed: HandedFacts | None = None,
) -> dict[str, Any]:
    """What class, stored tensors and roles say of a model of this config.json, see `Architecture`."""
    router, sizes, call = roles.router_weight, _sizes(skeleton, roles, parsed), skeleton.calls(TOKENS)[0]
    return {
        "model_type": parsed["model_type"],
        "model_class": type(skeleton.model).__name__,
        "sizes": sizes,
        **_outside(skeleton, stored),
        "unread": _patterns(stored),
        "layer_prefix": stored.prefix + "{layer}.",
        "kinds": _kinds(skeleton, stored, kinds, roles, beside=handed is not None or bool(call.tokens)),
        "handed": handed and handed.model_dump(),
        "tokens": bool(call.tokens),
        "streams": call.states[0, 0].numel() // sizes["hidden"]["value"],
        **_experts(skeleton, stored, roles),
        "norm": _norm(stored, roles),
        "router": {
            "tensor": stored.published(router),
            "served": "F32" if stored.dtype(router) == "F32" else "BF16",
            "scoring": roles.scoring,
        },
        "modules": {
            "rename": stored.renamed(),
            "converted": stored.converted,
            "idle": list(roles.idle),
            "norm": roles.norm,
            "router": router.rpartition(".")[0],
            "experts": roles.experts,
        },
        "positions": getattr(skeleton.config.get_text_config(), "max_position_embeddings", None),
        "probes": roles.probes,
    }


def _require_length_alone(skeleton: Skeleton) -> None:
    """Refuse a model whose layers get arguments, other than the token ids, that depend on these.

    Raises:
        ArchitectureError: they do.
    """
    model, tokens = type(skeleton.model).__name__, torch.arange(TOKENS).unsqueeze(0)
    for argument in differing_arguments(skeleton.calls_with(tokens), skeleton.calls(TOKENS)):
        raise ArchitectureError(
            f"{model}: {argument} depends on the tokens, not on their number alone; such a model cannot be computed "
            "layer by layer here; give another model"
        )


def skeleton_of(config: dict[str, Any]) -> Skeleton:
    """transformers' whole model of a config.json, without weights.

    Raises:
        ArchitectureError: transformers has no such class, cannot make it of this config.json, or it predicts no tokens.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ArchitectureError("architectures does not name the model's class; give a published config.json")
    import transformers

    found = model_class(names[0], "architectures")
    try:
        skeleton = Skeleton(found, config_of(found, config))
    except FAILURES as failure:
        reason = " ".join(str(failure).split())
        itself = "; correct this file"
        if not can_be_made(found):
            itself = ", nor of its class's own defaults; give another model, or use another version of transformers"
        raise ArchitectureError(
            f"transformers {transformers.__version__} cannot make {names[0]} of it ({type(failure).__name__}: "
            f"{reason}){itself}"
        ) from None
    if getattr(skeleton.config, "is_encoder_decoder", False):
        raise ArchitectureError(
            f"architectures: {names[0]} has an encoder, which this program does not compute; give a model that is a "
            "decoder alone"
        )
    if skeleton.model.get_output_embeddings() is None:
        raise ArchitectureError(
            f"architectures: {names[0]} has no head that predicts tokens; give a model that has one"
        )
    text = skeleton.config.get_text_config()
    given = [c.arguments.get("position_embeddings") for c in skeleton.calls(TOKENS)]
    rotary, said = getattr(text, "rotary_dim", None), rotated_channels(text)
    for rotated in {one[0].shape[-1] for one in given if isinstance(one, tuple)}:
        if (rotary and rotated != rotary) or (said and rotated > said + said % 2):  # in pairs
            raise ArchitectureError(
                f"{f'rotary_dim is {rotary}' if rotary else f'{FACTOR} means {said}'}, but {names[0]} of transformers "
                f"{transformers.__version__} rotates {rotated} channels of each head; such a model would be computed "
                "wrongly and is refused; give another model"
            )
    return skeleton


# The stored tensors -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """Layers of one structure, the roles of their parts if they have experts, and the probe `batch`."""

    layers: list[int]
    roles: Roles | None
    batch: float


class Header(NamedTuple):
    """The header entry of a stored tensor: dtype as safetensors calls it, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint by what the model does with them; the scales of FP8 weights go with these.

    Attributes:
        headers: of all.
        prefix: of the names of a decoder layer's tensors, before the layer's number.
        layers: for each decoder layer its tensors: their names without the prefix, and their places.
        outside: names and places of those outside the layers that the model computes with.
        carried: the names of all others.
        converted: parameters within a layer that transformers makes of other tensors, with the names of these.
    """

    headers: Mapping[str, Header]
    prefix: str
    layers: list[dict[str, Place]]
    outside: dict[str, Place]
    carried: list[str]
    converted: dict[str, list[str]]

    def header(self, layer: int, name: str) -> Header:
        """The header entry of a tensor of a layer, by its name without the prefix."""
        return self.headers[f"{self.prefix}{layer}.{name}"]

    @cached_property
    def _published(self) -> dict[str, tuple[str, int]]:
        """For each parameter within a layer: the name of its tensor, and the first layer that has it."""
        found: dict[str, tuple[str, int]] = {}
        for number, names in enumerate(self.layers):
            for name, place in names.items():
                found.setdefault(place.parameter, (name, number))
        for parameter, (part, *_) in self.converted.items():
            found.setdefault(parameter, (part, next(n for n, here in enumerate(self.layers) if part in here)))
        return found

    def published(self, path: str) -> str:
        """The stored name of a parameter, or of a module with a weight, within a layer; other words as they are."""
        if path in self._published:
            return self._published[path][0]
        weight = self._published.get(f"{path}.weight")
        return weight[0].removesuffix(".weight") if weight else path

    def modules(self, paths: Sequence[str]) -> list[str]:
        """The stored names of modules with a weight within a layer, of a converted one those of all parts."""
        parts = [(path, self.converted.get(f"{path}.weight")) for path in paths]
        return [
            name.removesuffix(".weight")
            for path, names in parts
            for name in ([self.published(path)] if names is None else names)
        ]

    def dtype(self, parameter: str) -> str:
        """The stored dtype of a parameter within a layer."""
        name, number = self._published[parameter]
        return self.header(number, name).dtype

    def renamed(self) -> dict[str, str]:
        """The stored names of parameters, and of modules with a weight, that are not transformers'."""
        pairs = {name: place.parameter for names in self.layers for name, place in names.items() if place.part is None}
        differ = {name: parameter for name, parameter in pairs.items() if name != parameter}
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
        return sorted({_EXPERT.sub("", f".{name}"): name for name in backwards}.values())


def sort_out(skeleton: Skeleton, headers: Mapping[str, Header], idle: Collection[str] = ()) -> StoredTensors:
    """Find the place of every stored tensor.

    Args:
        idle: parameters within a layer that no text goes through: the tensors of other experts.

    Raises:
        ArchitectureError: the names of a layer's tensors do not begin alike, or transformers cannot convert them.
    """
    layers: list[dict[str, Place]] = [{} for _ in skeleton.layers]
    outside: dict[str, Place] = {}
    carried: list[str] = []
    prefixes: set[str] = set()
    needed = _needed_outside(skeleton)
    place_of = cache(skeleton.place)  # of the first expert: all others lie beside it
    other_experts = _other_experts(skeleton, headers) if idle else set()
    for name in headers:
        weight = _weight_of(name, headers)
        place = place_of(_EXPERT.sub(r"\g<1>0\3", weight))
        expert = _EXPERT.search(weight)
        if (
            place is None
            or (place.layer is None and place.parameter not in needed)
            or place.parameter in idle
            or (expert is not None and int(expert[2]) in other_experts)
        ):
            carried.append(name)
        elif weight != name:
            continue
        elif place.layer is None:
            outside[name] = place
        else:
            start, _, within = name.partition(f".{place.layer}.")
            prefixes.add(f"{start}.")
            layers[place.layer][within] = place
    if len(prefixes) != 1:
        raise ArchitectureError(
            f"the tensors of its layers begin with {' and '.join(sorted(prefixes)) or 'nothing known'}; "
            f"{type(skeleton.model).__name__} needs one beginning; give the published checkpoint"
        )
    prefix, order = prefixes.pop(), {name: number for number, name in enumerate(skeleton.parameters)}

    def in_order(names: Mapping[str, Place], path: str = "") -> dict[str, Place]:
        """As the class has the parameters, whatever the order in the files."""
        return dict(sorted(names.items(), key=lambda entry: order[path + entry[1].parameter]))

    outside = in_order(outside)
    layers = [in_order(names, f"{skeleton.path}.{number}.") for number, names in enumerate(layers)]
    return StoredTensors(headers, prefix, layers, outside, carried, _converted(skeleton, headers, prefix, layers))


def _converted(
    skeleton: Skeleton, headers: Mapping[str, Header], prefix: str, layers: Sequence[Mapping[str, Place]]
) -> dict[str, list[str]]:
    """The parameters besides those of all experts that transformers makes of other tensors, with the names of these.

    Raises:
        ArchitectureError: it cannot make them of the tensors that there are.
    """
    result: dict[str, list[str]] = {}
    for number, names in enumerate(layers):
        groups: dict[str, list[str]] = {}
        for name, place in names.items():
            if place.part is not None and not _EXPERTS.search(place.parameter):
                groups.setdefault(place.parameter, []).append(name)
        for parts in groups.values():
            full = [f"{prefix}{number}.{name}" for name in parts]
            try:
                made = skeleton.convert({name: torch.empty(headers[name].shape, device="meta") for name in full})
            except FAILURES as failure:
                made, reason = {}, " ".join(str(failure).split())
            else:
                reason = "they have other shapes"
            wrong = [name for name, one in made.items() if one.shape != skeleton.parameters[name].shape]
            if wrong or not made:
                shapes = ", ".join(f"{name} {list(headers[name].shape)}" for name in full)
                raise ArchitectureError(
                    f"transformers cannot make the parameters of {type(skeleton.model).__name__} of {shapes} "
                    f"({reason}); the files are incomplete, or of another model than config.json says"
                )
            result |= {name.removeprefix(f"{skeleton.path}.{number}."): parts for name in made}
    return result


def _other_experts(skeleton: Skeleton, headers: Mapping[str, Header]) -> set[int]:
    """The numbers under which experts are stored that are none of the first set, in a model with several sets.

    A tensor with its number stands for each of an expert's: transformers' conversion says where it goes.
    """
    some = next((name for name in headers if _EXPERT.search(name)), None)
    if some is None:  # all of a layer in one tensor, another for the other experts
        return set()
    layer = some[: some.index(".experts.")]
    numbers = {name: int(expert[2]) for name in headers if name.startswith(layer) and (expert := _EXPERT.search(name))}
    marks = {name: torch.full((1, 1), float(number)) for name, number in numbers.items()}
    made = skeleton.convert({name: mark for name, mark in marks.items() if _weight_of(name, headers) == name})
    place = skeleton.place(_EXPERT.sub(r"\g<1>0\3", some))
    assert place is not None
    first = made[f"{skeleton.path}.{place.layer}.{place.parameter}"]
    if not torch.equal(first, torch.arange(len(first)).view(-1, 1, 1).expand_as(first).float()):
        raise ArchitectureError(
            f"{layer}.experts: {type(skeleton.model).__name__} sends a text through experts that are not stored as the "
            "first ones; such a model cannot be quantized with this program"
        )
    return set(numbers.values()) - set(range(len(first)))


_EXPERT = re.compile(r"(\.experts\.)(\d+)(\.)")
_EXPERTS = re.compile(r"\.(gate_up_proj|down_proj)$")  # the parameters of all experts


def _weight_of(name: str, headers: Collection[str]) -> str:
    """The weight that a tensor is the scale of; its own name if it is none."""
    weights = (name.removesuffix(suffix) for suffix in SCALES if name.endswith(suffix))
    return next((weight for weight in weights if weight in headers), name)


def _needed_outside(skeleton: Skeleton) -> set[str]:
    """The parameters outside the layers that a text goes through: those beside the layers, and the head."""
    beside = skeleton.path.rpartition(".")[0] + "."
    head = _parameter_of(skeleton, skeleton.model.get_output_embeddings()).removesuffix("weight")
    layers = skeleton.path + "."
    return {name for name in skeleton.parameters if name.startswith((beside, head)) and not name.startswith(layers)}


def _parameter_of(skeleton: Skeleton, module: torch.nn.Module) -> str:
    """The name of a module's weight in the whole model."""
    path = next(path for path, one in skeleton.model.named_modules() if one is module)
    return f"{path}.weight"


def _require_complete(skeleton: Skeleton, stored: StoredTensors, idle: Collection[str]) -> None:
    """Refuse files without a tensor that the model computes with.

    Args:
        idle: parameters within a layer that it does not compute with.

    Raises:
        ArchitectureError: one is missing.
    """
    tied = set(getattr(skeleton.model, "all_tied_weights_keys", None) or ())
    missing = sorted(_needed_outside(skeleton) - {place.parameter for place in stored.outside.values()} - tied)
    for number, layer in enumerate(skeleton.layers):
        here = stored.layers[number]
        given = {place.parameter for place in here.values()} | set(idle)
        given |= {name for name, parts in stored.converted.items() if here.keys() >= set(parts)}
        missing += [f"{skeleton.path}.{number}.{name}" for name in layer.state_dict() if name not in given]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ArchitectureError(
            f"{type(skeleton.model).__name__} computes with {missing[0]}{more}, but no tensor in the files is "
            "that; the files are incomplete, or of another model than config.json says"
        )


# The parts of the facts -----------------------------------------------------------------------------------------------


def _common(found: Sequence[Roles]) -> Roles:
    """The roles of all layers with experts, with the largest number of each probe.

    Raises:
        ArchitectureError: there is no such layer, or they differ.
    """
    if not found:
        raise ArchitectureError("no layer has routed experts; give a mixture-of-experts model")
    for one in found[1:]:
        for name in ("experts", "router_weight", "router_follows", "norm", "norm_offset", "chosen", "scoring", "idle"):
            if getattr(one, name) != getattr(found[0], name):
                raise ArchitectureError(
                    f"in some layers {name} is {getattr(found[0], name)}, in others {getattr(one, name)}; "
                    "such a model cannot be quantized with this program"
                )
    readers = tuple(dict.fromkeys(reader for one in found for reader in one.readers))
    probes = {name: max(one.probes[name] for one in found) for name in found[0].probes}
    return replace(found[0], readers=readers, probes=probes)


def _sizes(skeleton: Skeleton, roles: Roles, given: Mapping[str, Any]) -> dict[str, Any]:
    config = skeleton.config.get_text_config()
    layer = next(one for one in skeleton.layers if roles.experts in dict(one.named_modules()))
    experts, hidden, width = layer.get_submodule(roles.experts).get_parameter("down_proj").shape
    sizes = {
        "layers": len(skeleton.layers),
        "experts": experts,
        "chosen": roles.chosen,
        "hidden": hidden,
        "width": width,
        "vocabulary": skeleton.model.get_input_embeddings().weight.shape[0],
        "heads": config.num_attention_heads,
    }
    kv_heads = config.to_dict().get(KEYS["kv_heads"][0])  # some classes have no such attribute, but one for each layer
    sizes |= {"kv_heads": kv_heads} if type(kv_heads) is int else {}
    if (getattr(config, "n_group", None) or 1) > 1:
        sizes |= {"groups": config.n_group, "chosen_groups": config.topk_group}
    given = given.get("text_config", given)

    def key(name: str) -> str:
        """Of the keys that mean this size, the one in config.json, or else the class's."""
        return next((one for one in KEYS[name] if given.get(one) == sizes[name]), KEYS[name][0])

    return {name: {"key": key(name), "value": size} for name, size in sizes.items()}


def _outside(skeleton: Skeleton, stored: StoredTensors) -> dict[str, Any]:
    """The facts about the tensors outside the layers."""
    names = {place.parameter: name for name, place in stored.outside.items()}
    embedding = names[_parameter_of(skeleton, skeleton.model.get_input_embeddings())]
    head = names.get(_parameter_of(skeleton, skeleton.model.get_output_embeddings()), embedding)
    tensors = {
        name: _tensor(skeleton.parameters[place.parameter].shape, stored.headers[name], place, stored)
        for name, place in stored.outside.items()
    }
    return {"outside": tensors, "embedding": embedding, "head": head}


def _tensor(shape: Sequence[int], header: Header, place: Place, stored: StoredTensors) -> dict[str, Any]:
    """The facts about one tensor: the class's shape, the stored dtype; float32 counts where not all others are.

    A tensor that is converted has its stored shape.
    """
    all_float32 = all(one.dtype in ("F32", *INTEGERS) for one in stored.headers.values())
    kept = ("F16", *INTEGERS) if all_float32 else ("F32", "F16", *INTEGERS)
    dtype = header.dtype if header.dtype in kept else "BF16"
    return {"shape": list(shape if place.part is None else header.shape), "dtype": dtype}


def _patterns(stored: StoredTensors) -> list[str]:
    """Regular expressions for the names of the carried tensors, as few as there can be, none of another tensor."""
    known = {f"{stored.prefix}{number}.{name}" for number, names in enumerate(stored.layers) for name in names}
    words = [name.split(".") for name in (*known, *stored.outside)]
    begun = {tuple(parts[:end]) for parts in words for end in range(1, len(parts))}
    patterns: dict[str, list[str]] = {}
    for name in stored.carried:
        parts = name.split(".")
        ends = (end for end in range(1, len(parts)) if tuple(parts[:end]) not in begun)
        end = next(ends, None)
        if end is None:
            patterns[re.escape(name)] = []
        elif parts[end - 1].isdecimal() and end > 1:
            patterns.setdefault(re.escape(".".join(parts[: end - 1])), []).append(parts[end - 1])
        else:
            patterns[re.escape(".".join(parts[:end])) + r"\..*"] = []
    return [
        start + (rf"\.({'|'.join(dict.fromkeys(numbers))})\..*" if numbers else "")
        for start, numbers in patterns.items()
    ]


def _norm(stored: StoredTensors, roles: Roles) -> dict[str, Any] | None:
    """The facts about the norm into which scales might be folded; None if there is none."""
    if roles.norm_offset is None:
        return None
    rearranged = [
        stored.published(one) for one in (f"{roles.norm}.weight", roles.router_weight) if one in stored.converted
    ]
    follow = [ROUTER, EXPERTS] if roles.router_follows and not rearranged else [EXPERTS, *rearranged]
    return {
        "tensor": stored.published(f"{roles.norm}.weight"),
        "readers": [*follow, *stored.modules(roles.readers), *stored.strangers],
        "offset": roles.norm_offset,
    }


def _kinds(
    skeleton: Skeleton, stored: StoredTensors, kinds: Sequence[Kind], roles: Roles, *, beside: bool
) -> list[dict[str, Any]]:
    """The facts about each kind of layer; layers of one structure whose tensors differ are of different kinds.

    Args:
        beside: whether more than a token's state is kept of it between layers; then none runs in halves.
    """
    result: dict[str, dict[str, Any]] = {}
    for numbers, one, batch in kinds:
        for number in numbers:
            facts = _of_layer(skeleton, stored, number, roles) | {
                "dense": one is None,
                "halves": one is not None and one.probes["halves"] < EXACT and not beside,
                "alone": not batch < EXACT,
                "own_gate": one is not None and one.own_gate,
            }
            result.setdefault(json.dumps(facts), facts | {"layers": []})["layers"].append(number)
    return list(result.values())


def _of_layer(skeleton: Skeleton, stored: StoredTensors, number: int, roles: Roles) -> dict[str, Any]:
    """What lies in a layer besides its routed experts."""
    layer = skeleton.layers[number]
    modules, parameters = dict(layer.named_modules()), layer.state_dict()
    tensors, linears = {}, {}
    for name, place in stored.layers[number].items():
        if place.parameter.startswith(f"{roles.experts}."):
            continue
        shape, module = parameters[place.parameter].shape, modules.get(place.parameter.removesuffix(".weight"))
        header = stored.header(number, name)
        is_linear = isinstance(module, torch.nn.Linear) and name.endswith(".weight")
        if is_linear and place.parameter != roles.router_weight:
            linears[name.removesuffix(".weight")] = list(shape if place.part is None else header.shape)
        else:
            tensors[name] = _tensor(shape, header, place, stored)
    return {"tensors": tensors, "linears": linears}


def _experts(skeleton: Skeleton, stored: StoredTensors, roles: Roles) -> dict[str, Any]:
    """The facts about the names and shapes of the routed experts' matrices.

    Tensors of all experts may have any names: transformers' rules say which parameter they are, or which part of it.

    Raises:
        ArchitectureError: they are stored in a layout that is not known here.
    """
    number = next(n for n, layer in enumerate(skeleton.layers) if roles.experts in dict(layer.named_modules()))
    parameters = dict(skeleton.layers[number].get_submodule(roles.experts).named_parameters())
    _, hidden, width = parameters["down_proj"].shape
    shapes = {"gate": [width, hidden], "up": [width, hidden], "down": [hidden, width]}
    names: dict[Matrix, str] = {}
    fused: dict[str, list[Matrix]] = {}
    prefixes = set()
    for name, place in stored.layers[number].items():
        path, _, parameter = place.parameter.rpartition(".")
        if path != roles.experts:
            continue
        single, shape = re.fullmatch(r"(.*\.)\d+\.(.+)\.weight", name), stored.header(number, name).shape
        matrix: Matrix = "down" if parameter == "down_proj" else "up" if place.part else "gate"
        if single:
            names[matrix] = single[2]
            prefixes.add(single[1])
        elif name.endswith(f".{parameter}") and place.part is None:
            prefixes.add(name.removesuffix(parameter))
        elif place.part is None and shape == parameters[parameter].shape:
            fused[name] = ["down"] if parameter == "down_proj" else ["gate", "up"]
        elif list(shape[1:]) == shapes[matrix] and hidden != width:  # else nothing tells it from a transposed one
            fused[name] = [matrix]
        else:
            raise ArchitectureError(
                f"{stored.prefix}{number}.{name} holds the experts in a layout of its own, "
                f"{list(shape)}; this program cannot read it; give a checkpoint with one "
                "tensor for each expert's matrix"
            )
    (prefix,) = prefixes or {f"{roles.experts}."}
    linears = {m: {"name": names.get(m, PROJECTIONS[m]), "shape": shapes[m]} for m in MATRICES}
    return {"expert_prefix": prefix + "{expert}.", "expert_linears": linears, "fused": fused}
