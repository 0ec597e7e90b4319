"""The facts about a model from its class in transformers, whose rules for loading give the names.

The rest comes from the stored tensors and from probes (roles.py), which do not say what a server calls its modules. Or
it comes from data about the family, see family_facts.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch

from quantizers.system.errors import ArchitectureError

from .architecture import EXPERTS, ROUTER, Architecture, HandedFacts, Stored
from .config_class import config_of, refusal, rotated_channels
from .contradictions import FACTOR, refuse_another_type
from .roles import (
    EXACT,
    TOKENS,
    Roles,
    find_handed,
    kinds_of_layers,
    probe,
    require_usable,
)
from .skeleton import (
    FAILURES,
    NOT_QUANTIZED,
    Place,
    Skeleton,
    can_be_made,
)
from .stored_tensors import (
    Header,
    StoredTensors,
    parameter_of,
    refuse_more_layers,
    require_complete,
    sort_out,
    stored_experts,
)
from .whole_class import model_class

INTEGERS = ("I32", "I64")  # numbers of something, such as of a table's rows

# This program's words for sizes, with their keys in config.json, of which a model has one.
KEYS = {
    "layers": ("num_hidden_layers", "num_layers"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "identities": ("zero_expert_num",),  # experts without matrices
    "chosen": ("num_experts_per_tok",),
    "hidden": ("hidden_size",),
    "latent": ("moe_latent_size", "moe_hidden_size"),  # where the experts read fewer numbers than a state has
    "width": ("moe_intermediate_size", "intermediate_size"),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "groups": ("n_group",),
    "chosen_groups": ("topk_group",),
}
ONE_FOR_ALL = {  # the roles that must be the same in all layers with experts
    "experts": "the experts' module",
    "count": "the number of experts with matrices",
    "has_gate": "whether experts have a gate",
    "router_weight": "the router's matrix",
    "router_follows": "whether the router reads the experts' norm",
    "norm": "the norm that the experts read",
    "norm_offset": "what that norm adds to its weight",
    "chosen": "the number of experts per token",
    "scoring": "the router's scoring",
    "idle": "the list of experts that no text goes through",
    "transposed": "whether experts are held transposed",
    "interleaved": "whether gate and up take turns",
    "weighs_inputs": "whether the router weighs what experts read",
    "identities": "the number of experts without matrices",
}


def derived_architecture(config: dict[str, Any], tensors: Mapping[str, Stored]) -> Architecture:
    """The facts about one model, from its config.json and the headers of its files.

    Raises:
        ArchitectureError: transformers has no class for it; a tensor is missing, or is converted in a way that is not
            known here; or a probe refutes what every quantized model must fulfil.
    """
    headers = tuple(sorted((name, info.dtype, tuple(info.shape)) for name, info in tensors.items()))
    return _derived(json.dumps(config), headers)


@cache  # a command asks several times, and building and probing the model takes seconds
def _derived(config: str, headers: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Architecture:
    parsed: dict[str, Any] = json.loads(config)
    refuse_another_type(parsed)
    skeleton = skeleton_of(parsed)
    try:
        handed, kinds = _probed(skeleton)
    except FAILURES as failure:
        raise refusal(type(skeleton.model), parsed, _probed, failure) from None
    roles = _common(kinds)
    require_usable(roles, parsed["model_type"])
    stored_headers = {name: Header(dtype, shape) for name, dtype, shape in headers}
    stored = sort_out(skeleton, stored_headers, roles.idle, roles.count if roles.identities else None)
    require_complete(skeleton, stored, roles.idle)
    refuse_more_layers(skeleton, stored)
    return Architecture.model_validate(described(parsed, skeleton, stored, kinds, roles, handed))


def _probed(skeleton: Skeleton) -> tuple[HandedFacts | None, list[Kind]]:
    """Find what layers hand on, and each kind of them with the roles of its parts."""
    handed = find_handed(skeleton)
    skeleton.require_layers_alone(TOKENS)
    return handed, [Kind(numbers, *probe(skeleton, numbers[0], handed)) for numbers in kinds_of_layers(skeleton)]


def described(
    config: Mapping[str, Any],
    skeleton: Skeleton,
    stored: StoredTensors,
    kinds: Sequence[Kind],
    roles: Roles,
    handed: HandedFacts | None = None,
) -> dict[str, Any]:
    """Assemble the fields of `Architecture` from a model's config.json, class, stored tensors and roles."""
    tables = _tables(skeleton, stored)
    scales = {
        f"{stored.prefix}{number}.{table['scale']}"
        for numbers, table in tables.values()
        for number in numbers
        if table["scale"]
    }
    stored = replace(stored, carried=[name for name in stored.carried if name not in scales])
    first = next(kind.layers[0] for kind in kinds if kind.roles)  # of the layers with experts
    experts = dict(skeleton.layers[first].get_submodule(roles.experts).named_parameters())
    shapes = experts["down_proj"].shape
    down = (shapes[0], shapes[2], shapes[1]) if roles.transposed else tuple(shapes)  # (E, H, I)
    sizes = _sizes(skeleton, roles, down, config)
    router, call = roles.router_weight, skeleton.calls(TOKENS)[0]
    return {
        "model_type": config["model_type"],
        "model_class": skeleton.name,
        "sizes": sizes,
        **_outside(skeleton, stored),
        "unread": _patterns(stored, scales),
        "layer_prefix": stored.prefix + "{layer}.",
        "kinds": _kinds(
            skeleton, stored, kinds, roles, scales=scales, keeps_more=handed is not None or bool(call.tokens)
        ),
        "handed": handed and handed.model_dump(),
        "tokens": bool(call.tokens),
        "streams": call.states[0, 0].numel() // sizes["hidden"]["value"],
        **stored_experts(stored, first, roles.experts, experts, down),
        "norm": _norm(stored, roles),
        "router": {
            "tensor": stored.published(router),
            "served": "F32" if stored.dtype(router) == "F32" else "BF16",
            "scoring": roles.scoring,
        },
        "modules": {
            "rename": stored.renamed(),
            "converted": {name: parts for name, parts in stored.converted.items() if name not in tables},
            "tables": {name.removesuffix(".weight"): table for name, (_, table) in tables.items()},
            "idle": list(roles.idle),
            "transposed": roles.transposed,
            "interleaved": roles.interleaved,
            "weighs_inputs": roles.weighs_inputs,
            "norm": roles.norm,
            "router": roles.router,
            "experts": roles.experts,
        },
        "positions": getattr(skeleton.config.get_text_config(), "max_position_embeddings", None),
        "probes": roles.probes,
    }


def skeleton_of(config: dict[str, Any]) -> Skeleton:
    """transformers' whole model of a config.json, without weights.

    Raises:
        ArchitectureError: transformers has no such class, cannot make it of this config.json, or it predicts no tokens.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ArchitectureError("", "architectures does not name the model's class", "give a published config.json")
    import transformers

    cls = model_class(names[0], "architectures", config)
    try:
        skeleton = Skeleton(cls, config_of(cls, config))
    except FAILURES as failure:
        if can_be_made(cls):
            raise refusal(cls, config, lambda _: None, failure, "make") from None
        reason = " ".join(str(failure).split())
        version = f"transformers {transformers.__version__}"
        raise ArchitectureError(
            "",
            f"{version} cannot make {names[0]} of it ({type(failure).__name__}: {reason}), nor of its class's own "
            "defaults",
            "give another model, or use another version of transformers",
        ) from None
    if skeleton.config.is_encoder_decoder and type(skeleton.config).is_encoder_decoder:  # a decoder may say it in vain
        raise ArchitectureError(
            "architectures",
            f"{names[0]} has an encoder, which this program does not compute",
            "give a model that is a decoder alone",
        )
    if skeleton.head is None:
        raise ArchitectureError(
            "architectures", f"{names[0]} has no head that predicts tokens", "give a model that has one"
        )
    text = skeleton.config.get_text_config()
    try:
        calls = skeleton.calls(TOKENS)
    except ArchitectureError as failure:
        raise refusal(cls, config, lambda other: other.calls(TOKENS), failure) from None
    given = [c.arguments.get("position_embeddings") for c in calls]
    rotary, by_config = getattr(text, "rotary_dim", None), rotated_channels(text)
    for rotated in {embeddings[0].shape[-1] for embeddings in given if isinstance(embeddings, tuple)}:
        if (rotary and rotated != rotary) or (by_config and rotated > by_config + by_config % 2):  # in pairs
            raise ArchitectureError(
                "",
                f"{f'rotary_dim is {rotary}' if rotary else f'{FACTOR} means {by_config}'}, but {names[0]} of "
                f"transformers {transformers.__version__} rotates {rotated} channels of each head; such a model would "
                "be computed wrongly and is refused",
                "give another model",
            )
    return skeleton


class Kind(NamedTuple):
    """Layers of one structure, and what their probes found, see `probe`."""

    layers: list[int]
    roles: Roles | None
    batch: float
    attention: str | None


# The parts of the facts -----------------------------------------------------------------------------------------------


def _common(kinds: Sequence[Kind]) -> Roles:
    """The roles of all layers with experts, with the largest number of each probe; refuses those that differ."""
    numbers = [kind.layers[0] for kind in kinds if kind.roles]
    layers = [kind.roles for kind in kinds if kind.roles]
    if not layers:
        raise ArchitectureError("", "no layer has routed experts", "give a mixture-of-experts model")
    for number, layer in zip(numbers, layers, strict=True):
        for name, meaning in ONE_FOR_ALL.items():
            first, other = getattr(layers[0], name), getattr(layer, name)
            if first != other:
                raise ArchitectureError(
                    "", f"{meaning} is {first} in layer {numbers[0]}, and {other} in layer {number}", NOT_QUANTIZED
                )
    readers = tuple(dict.fromkeys(reader for layer in layers for reader in layer.readers))
    probes = {name: max(layer.probes[name] for layer in layers) for name in layers[0].probes}
    return replace(layers[0], readers=readers, probes=probes)


def _sizes(skeleton: Skeleton, roles: Roles, down: Sequence[int], given: Mapping[str, Any]) -> dict[str, Any]:
    """The facts about the sizes of a model whose experts have `down_proj` of a shape (E, rows, I)."""
    config = skeleton.config.get_text_config()
    sizes = {
        "layers": len(skeleton.layers),
        "experts": down[0],
        "chosen": roles.chosen,
        "hidden": skeleton.calls(TOKENS)[0].states.shape[-1],
        "width": down[2],
        "vocabulary": skeleton.model.get_input_embeddings().weight.shape[0],
        # Some classes have no such attributes, but one for each layer; others have them under another name.
        "heads": config.to_dict().get(KEYS["heads"][0]) or config.num_attention_heads,
    }
    sizes |= {"latent": down[1]} if down[1] != sizes["hidden"] else {}
    sizes |= {"identities": roles.identities} if roles.identities else {}
    kv_heads = config.to_dict().get(KEYS["kv_heads"][0])
    sizes |= {"kv_heads": kv_heads} if type(kv_heads) is int else {}
    if (getattr(config, "n_group", None) or 1) > 1:
        sizes |= {"groups": config.n_group, "chosen_groups": config.topk_group}
    given = given.get("text_config", given)

    def key(name: str) -> str:
        """Return the key of this size in config.json, or the class's own name for it."""
        return next((spelling for spelling in KEYS[name] if given.get(spelling) == sizes[name]), KEYS[name][0])

    return {name: {"key": key(name), "value": size} for name, size in sizes.items()}


def _outside(skeleton: Skeleton, stored: StoredTensors) -> dict[str, Any]:
    """The facts about the tensors outside the layers."""
    names = {place.parameter: name for name, place in stored.outside.items()}
    embedding = names[parameter_of(skeleton, skeleton.model.get_input_embeddings())]
    head = names.get(parameter_of(skeleton, skeleton.head), embedding)
    tensors = {
        name: _tensor(skeleton.parameters[place.parameter].shape, stored.headers[name], place, stored)
        for name, place in stored.outside.items()
    }
    return {"outside": tensors, "embedding": embedding, "head": head}


def _tensor(shape: Sequence[int], header: Header, place: Place, stored: StoredTensors) -> dict[str, Any]:
    """The facts about one tensor: the class's shape, the stored dtype; float32 counts where not all others are.

    A tensor that is converted has its stored shape.
    """
    all_float32 = all(stored_header.dtype in ("F32", *INTEGERS) for stored_header in stored.headers.values())
    kept = ("F16", *INTEGERS) if all_float32 else ("F32", "F16", *INTEGERS)
    dtype = header.dtype if header.dtype in kept else "BF16"
    return {"shape": list(shape if place.part is None else header.shape), "dtype": dtype}


def _tables(skeleton: Skeleton, stored: StoredTensors) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """The tables of which layers look rows up, by their parameters within a layer: the layers and the facts.

    They are those of `torch.nn.Embedding`. In which order the rows of several tensors follow is asked of transformers'
    conversion; where that does more than join them, the parameter is no table.

    Raises:
        ArchitectureError: two layers have the same table in other tensors, or one with a scale and one without.
    """
    result: dict[str, tuple[list[int], dict[str, Any]]] = {}
    for number, layer in enumerate(skeleton.layers):
        modules = (path for path, module in layer.named_modules() if type(module) is torch.nn.Embedding)
        for parameter in (f"{path}.weight" for path in modules):
            start = f"{stored.prefix}{number}."
            names = [n for n, place in stored.layers[number].items() if place.parameter == parameter]
            if len(names) > 1:
                marks = {f"{start}{name}": torch.full((1, 1), float(mark)) for mark, name in enumerate(names)}
                (made,) = skeleton.convert(marks).values()
                order = made.flatten().tolist()
                names = [names[int(mark)] for mark in order] if sorted(order) == [*range(len(names))] else []
            if names:
                scale = f"{parameter}_scale"
                header = stored.headers.get(f"{start}{scale}")
                has_scale = header is not None and math.prod(header.shape) == 1
                table = {"tensors": names, "scale": scale if has_scale else None}
                layers, first = result.setdefault(parameter, ([], table))
                if table != first:
                    differs = ", and one has a scale" if table["tensors"] == first["tensors"] else ""
                    raise ArchitectureError(
                        f"{start}{parameter}",
                        f"this table is not stored as that of layer {layers[0]}{differs}",
                        NOT_QUANTIZED,
                    )
                layers.append(number)
    return result


def _patterns(stored: StoredTensors, scales: Collection[str]) -> list[str]:
    """Regular expressions for the names of the carried tensors, as few as there can be, none of another tensor."""
    known = {f"{stored.prefix}{number}.{name}" for number, names in enumerate(stored.layers) for name in names}
    words = [name.split(".") for name in (*known, *scales, *stored.outside)]
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
    rests = (rf"\.({'|'.join(dict.fromkeys(numbers))})\..*" if numbers else "" for numbers in patterns.values())
    return [start + rest for start, rest in zip(patterns, rests, strict=True)]


def _norm(stored: StoredTensors, roles: Roles) -> dict[str, Any] | None:
    """The facts about the norm into which scales might be folded; None if there is none."""
    if roles.norm_offset is None:
        return None
    rearranged = [
        stored.published(name) for name in (f"{roles.norm}.weight", roles.router_weight) if name in stored.converted
    ]
    follow = [ROUTER, EXPERTS] if roles.router_follows and not rearranged else [EXPERTS, *rearranged]
    return {
        "tensor": stored.published(f"{roles.norm}.weight"),
        "readers": [*follow, *stored.modules(roles.readers), *stored.strangers],
        "offset": roles.norm_offset,
    }


def _kinds(
    skeleton: Skeleton,
    stored: StoredTensors,
    kinds: Sequence[Kind],
    roles: Roles,
    *,
    scales: Collection[str],
    keeps_more: bool,
) -> list[dict[str, Any]]:
    """The facts about each kind of layer; layers of one structure whose tensors differ are of different kinds.

    Args:
        scales: the names of those of tables.
        keeps_more: whether more than a token's state is kept of it between layers; then none runs in halves.
    """
    result: dict[str, dict[str, Any]] = {}
    for numbers, of_experts, batch, attention in kinds:
        for number in numbers:
            own = _layer_tensors(skeleton, stored, number, roles)
            start = f"{stored.prefix}{number}."
            for scale in (name for name in scales if name.startswith(start)):
                header = stored.headers[scale]
                own["tensors"][scale.removeprefix(start)] = {"shape": list(header.shape), "dtype": header.dtype}
            facts = own | {
                "dense": of_experts is None,
                "halves": of_experts is not None and of_experts.probes["halves"] < EXACT and not keeps_more,
                "alone": not batch < EXACT,
                "own_gate": of_experts is not None and of_experts.own_gate,
                "degree": 1 if of_experts is None else of_experts.degree,
                "cached": _cached(own["linears"], stored.layers[number], attention),
            }
            result.setdefault(json.dumps(facts), facts | {"layers": []})["layers"].append(number)
    return list(result.values())


def _cached(linears: Collection[str], places: Mapping[str, Place], attention: str | None) -> str | None:
    """The published name of the attention module at a path, if its keys and values are what servers cache."""
    of_module = [name for name in linears if places[f"{name}.weight"].parameter.startswith(f"{attention}.")]
    heads = [name for name in of_module if name.rpartition(".")[2] in ("k_proj", "qkv_proj")]
    return heads[0].rpartition(".")[0] if len(heads) == 1 else None


def _layer_tensors(skeleton: Skeleton, stored: StoredTensors, number: int, roles: Roles) -> dict[str, Any]:
    """Return the tensors and linear modules of a layer besides its routed experts."""
    layer = skeleton.layers[number]
    modules, parameters = dict(layer.named_modules()), layer.state_dict()
    tensors, linears = {}, {}
    for name, place in stored.layers[number].items():
        if place.parameter.startswith(f"{roles.experts}.") and not place.parameter.endswith("_bias"):
            continue
        shape, module = parameters[place.parameter].shape, modules.get(place.parameter.removesuffix(".weight"))
        header = stored.header(number, name)
        is_linear = isinstance(module, torch.nn.Linear) and name.endswith(".weight")
        if is_linear and place.parameter != roles.router_weight:
            linears[name.removesuffix(".weight")] = list(shape if place.part is None else header.shape)
        else:
            tensors[name] = _tensor(shape, header, place, stored)
    return {"tensors": tensors, "linears": linears}
