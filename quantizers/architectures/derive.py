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
from .facts import Stored
from .matrices import MATRICES, PROJECTIONS, Matrix
from .roles import EXACT, TOKENS, Roles, kinds_of_layers, probe, require_usable
from .sizes import KEYS
from .skeleton import Place, Skeleton, config_of, model_class

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


@cache
def _derived(config: str, headers: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Architecture:
    # A command asks several times, and building and probing the model takes seconds.
    parsed: dict[str, Any] = json.loads(config)
    skeleton = skeleton_of(parsed)
    _require_states_alone(skeleton)
    kinds = [Kind(numbers, *probe(skeleton, numbers[0])) for numbers in kinds_of_layers(skeleton)]
    roles = _common([kind.roles for kind in kinds if kind.roles is not None])
    require_usable(roles, parsed["model_type"])
    stored = sort_out(skeleton, {name: Header(dtype, shape) for name, dtype, shape in headers})
    _require_complete(skeleton, stored)
    return described(parsed, skeleton, stored, kinds, roles)


def described(
    parsed: Mapping[str, Any], skeleton: Skeleton, stored: StoredTensors, kinds: Sequence[Kind], roles: Roles
) -> Architecture:
    """The facts about a model of this config.json, with these roles."""
    norm, router = roles.norm, roles.router_weight
    assert norm is not None  # see require_usable
    return Architecture.model_validate(
        {
            "model_type": parsed["model_type"],
            "model_class": type(skeleton.model).__name__,
            "sizes": _sizes(skeleton, roles, parsed),
            **_outside(skeleton, stored),
            "unread": _patterns(stored),
            "layer_prefix": stored.prefix + "{layer}.",
            "kinds": _kinds(skeleton, stored, kinds, roles),
            **_experts(skeleton, stored, roles),
            "norm": {
                "tensor": stored.published(f"{norm}.weight"),
                "readers": [ROUTER, EXPERTS, *map(stored.published, roles.readers), *stored.strangers],
                "offset": roles.norm_offset,
            },
            "router": {
                "tensor": stored.published(router),
                "served": "F32" if stored.dtype(router) == "F32" else "BF16",
                "scoring": roles.scoring,
            },
            "modules": {
                "rename": stored.renamed(),
                "norm": norm,
                "router": router.rpartition(".")[0],
                "experts": roles.experts,
            },
            "positions": getattr(skeleton.config.get_text_config(), "max_position_embeddings", None),
            "probes": roles.probes,
        }
    )


def _require_states_alone(skeleton: Skeleton) -> None:
    """Refuse a model whose layers hand on more than hidden states.

    Raises:
        ArchitectureError: they do.
    """
    handed = dict.fromkeys(name for call in skeleton.calls(TOKENS) for name in call.handed)
    if handed:
        raise ArchitectureError(
            f"{type(skeleton.model).__name__}: its layers hand on more than hidden states ({', '.join(handed)}); such "
            "a model cannot be computed layer by layer here; give another model"
        )


def skeleton_of(config: dict[str, Any]) -> Skeleton:
    """transformers' whole model of a config.json, without weights.

    Raises:
        ArchitectureError: transformers has no such class, cannot make it of this config.json, or it predicts no tokens.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ArchitectureError("architectures does not name the model's class; give a published config.json")
    found = model_class(names[0], "architectures")
    try:
        skeleton = Skeleton(found, config_of(found, config))
    except ArchitectureError:
        raise
    except Exception as failure:  # whatever its class raises
        reason = " ".join(str(failure).split())
        raise ArchitectureError(
            f"transformers cannot make {names[0]} of it ({type(failure).__name__}: {reason}); correct this file"
        ) from None
    if skeleton.model.get_output_embeddings() is None:
        raise ArchitectureError(
            f"architectures: {names[0]} has no head that predicts tokens; give a model that has one"
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
        outside: names and parameters of those outside the layers that the model computes with.
        carried: the names of all others.
    """

    headers: Mapping[str, Header]
    prefix: str
    layers: list[dict[str, Place]]
    outside: dict[str, str]
    carried: list[str]

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
        return found

    def published(self, path: str) -> str:
        """The stored name of a parameter, or of a module with a weight, within a layer; other words as they are."""
        if path in self._published:
            return self._published[path][0]
        weight = self._published.get(f"{path}.weight")
        return weight[0].removesuffix(".weight") if weight else path

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
        """Tensors in decoder layers, without the prefix, that the model has no place for; servers may know them."""
        within = re.compile(re.escape(self.prefix) + r"(\d+)\.(.+)")
        matches = [match for name in self.carried if (match := within.fullmatch(name))]
        return sorted({match[2] for match in matches if int(match[1]) < len(self.layers)})


def sort_out(skeleton: Skeleton, headers: Mapping[str, Header]) -> StoredTensors:
    """Find the place of every stored tensor.

    Raises:
        ArchitectureError: the names of a layer's tensors do not begin alike, or one is converted in a way that is not
            known here.
    """
    layers: list[dict[str, Place]] = [{} for _ in skeleton.layers]
    outside: dict[str, str] = {}
    carried: list[str] = []
    prefixes: set[str] = set()
    needed = _needed_outside(skeleton)
    place_of = cache(skeleton.place)  # of the first expert: all others lie beside it
    for name in headers:
        weight = _weight_of(name, headers)
        place = place_of(_EXPERT.sub(r"\g<1>0\2", weight))
        if place is None or (place.layer is None and place.parameter not in needed):
            carried.append(name)
        elif weight != name:
            continue
        elif place.layer is None:
            outside[name] = place.parameter
        else:
            if place.part is not None and not _EXPERTS.search(place.parameter):
                model = type(skeleton.model).__name__
                raise ArchitectureError(
                    f"{model} makes {place.parameter} of {name} and other tensors; this program cannot do "
                    "that; give another model"
                )
            start, _, within = name.partition(f".{place.layer}.")
            prefixes.add(f"{start}.")
            layers[place.layer][within] = place
    if len(prefixes) != 1:
        raise ArchitectureError(
            f"the tensors of its layers begin with {' and '.join(sorted(prefixes)) or 'nothing known'}; "
            f"{type(skeleton.model).__name__} needs one beginning; give the published checkpoint"
        )
    return StoredTensors(headers, prefixes.pop(), layers, outside, carried)


_EXPERT = re.compile(r"(\.experts\.)\d+(\.)")
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


def _require_complete(skeleton: Skeleton, stored: StoredTensors) -> None:
    """Refuse files without a tensor that the model computes with.

    Raises:
        ArchitectureError: one is missing.
    """
    tied = set(getattr(skeleton.model, "all_tied_weights_keys", None) or ())
    missing = sorted(_needed_outside(skeleton) - set(stored.outside.values()) - tied)
    for number, layer in enumerate(skeleton.layers):
        given = {place.parameter for place in stored.layers[number].values()}
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
        for name in ("experts", "router_weight", "norm", "norm_offset", "chosen", "scoring"):
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
    sizes |= {
        name: size
        for name in ("kv_heads", "head_dim")
        if type(size := getattr(config, KEYS[name][0], 0)) is int and size
    }
    if (getattr(config, "n_group", None) or 1) > 1:
        sizes |= {"groups": config.n_group, "chosen_groups": config.topk_group}
    given = given.get("text_config", given)

    def key(name: str) -> str:
        """Of the keys that mean this size, the one in config.json, or else the class's."""
        return next((one for one in KEYS[name] if given.get(one) == sizes[name]), KEYS[name][0])

    return {name: {"key": key(name), "value": size} for name, size in sizes.items()}


def _outside(skeleton: Skeleton, stored: StoredTensors) -> dict[str, Any]:
    """The facts about the tensors outside the layers."""
    names = {parameter: name for name, parameter in stored.outside.items()}
    embedding = names[_parameter_of(skeleton, skeleton.model.get_input_embeddings())]
    head = names.get(_parameter_of(skeleton, skeleton.model.get_output_embeddings()), embedding)
    shapes = {name: skeleton.parameters[parameter].shape for name, parameter in stored.outside.items()}
    tensors = {name: _tensor(shape, stored.headers[name], stored) for name, shape in shapes.items()}
    return {"outside": tensors, "embedding": embedding, "head": head}


def _tensor(shape: Sequence[int], header: Header, stored: StoredTensors) -> dict[str, Any]:
    """The facts about one tensor: the class's shape, the stored dtype; float32 counts where not all are float32."""
    all_float32 = all(one.dtype == "F32" for one in stored.headers.values())
    dtype = "F32" if header.dtype == "F32" and not all_float32 else "F16" if header.dtype == "F16" else "BF16"
    return {"shape": list(shape), "dtype": dtype}


def _patterns(stored: StoredTensors) -> list[str]:
    """Regular expressions for the names of the carried tensors, as few as there can be, none of another tensor."""
    known = {f"{stored.prefix}{number}.{name}" for number, names in enumerate(stored.layers) for name in names}
    words = [name.split(".") for name in (*known, *stored.outside)]
    begun = {tuple(parts[:end]) for parts in words for end in range(1, len(parts))}
    patterns: dict[str, None] = {}
    for name in stored.carried:
        parts = name.split(".")
        ends = (end for end in range(1, len(parts)) if tuple(parts[:end]) not in begun)
        end = next(ends, None)
        patterns[re.escape(name) if end is None else re.escape(".".join(parts[:end])) + r"\..*"] = None
    return list(patterns)


def _kinds(skeleton: Skeleton, stored: StoredTensors, kinds: Sequence[Kind], roles: Roles) -> list[dict[str, Any]]:
    """The facts about each kind of layer; layers of one structure whose tensors differ are of different kinds."""
    result: dict[str, dict[str, Any]] = {}
    for numbers, one, batch in kinds:
        for number in numbers:
            facts = _of_layer(skeleton, stored, number, roles) | {
                "dense": one is None,
                "halves": one is not None and one.probes["halves"] < EXACT,
                "alone": not batch < EXACT,
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
        is_linear = isinstance(module, torch.nn.Linear) and name.endswith(".weight")
        if is_linear and place.parameter != roles.router_weight:
            linears[name.removesuffix(".weight")] = list(shape)
        else:
            tensors[name] = _tensor(shape, stored.header(number, name), stored)
    return {"tensors": tensors, "linears": linears}


def _experts(skeleton: Skeleton, stored: StoredTensors, roles: Roles) -> dict[str, Any]:
    """The facts about the names and shapes of the routed experts' matrices.

    Raises:
        ArchitectureError: they are stored in a layout that is not known here.
    """
    number = next(n for n, layer in enumerate(skeleton.layers) if roles.experts in dict(layer.named_modules()))
    parameters = dict(skeleton.layers[number].get_submodule(roles.experts).named_parameters())
    names: dict[Matrix, str] = {}
    prefixes = set()
    for name, place in stored.layers[number].items():
        path, _, parameter = place.parameter.rpartition(".")
        if path != roles.experts:
            continue
        single = re.fullmatch(r"(.*\.)\d+\.(.+)\.weight", name)
        if single:
            names["down" if parameter == "down_proj" else "up" if place.part else "gate"] = single[2]
            prefixes.add(single[1])
        elif name.endswith(f".{parameter}") and place.part is None:
            prefixes.add(name.removesuffix(parameter))
        else:
            raise ArchitectureError(
                f"{stored.prefix}{number}.{name} holds the experts in a layout of its own, "
                f"{list(stored.header(number, name).shape)}; this program cannot read it; give a checkpoint with one "
                "tensor for each expert's matrix"
            )
    (prefix,) = prefixes
    _, hidden, width = parameters["down_proj"].shape
    shapes = {"gate": [width, hidden], "up": [width, hidden], "down": [hidden, width]}
    linears = {m: {"name": names.get(m, PROJECTIONS[m]), "shape": shapes[m]} for m in MATRICES}
    return {"expert_prefix": prefix + "{expert}.", "expert_linears": linears}
