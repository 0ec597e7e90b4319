"""The facts about a model of a family with data: what its class in transformers says, and the data laid over it.

Nothing is probed, and no files are needed: names, shapes and places are those of the tensors that the class itself
would write.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from quantizers.system.errors import ArchitectureError

from .architecture import Architecture, Family
from .derive import Header, Kind, described, skeleton_of, sort_out
from .roles import Roles, kinds_of_layers
from .sizes import MOST_MTP_LAYERS, require_possible, require_sane
from .skeleton import Skeleton

BESIDES = {"float32", "mtp_layer", "roles", "aliases", "config"}  # keys of a family that no architecture has


def of_family(family: Family, config: dict[str, Any], where: str) -> Architecture:
    """The facts about a model of a family, from its config.json alone.

    Args:
        where: the path of config.json, for messages.

    Raises:
        ArchitectureError: config.json contradicts itself or the data, or its class cannot be made of it.
    """
    require_sane(config, where)
    for key, expected in family.asserts.items():
        if key in config and config[key] != expected:
            raise ArchitectureError(
                f"{where}: {key} is {reprlib.repr(config[key])}, but the facts of {family.model_type} rely on "
                f"{expected!r}; such a model would be computed wrongly and is refused; give another model"
            )
    try:
        facts = Architecture.model_validate(_described(family, config))
    except ValidationError as failure:
        raise ArchitectureError(f"{where}: {failure.errors()[0]['msg']}; correct the data about the family") from None
    except ArchitectureError as failure:
        raise ArchitectureError(f"{where}: {failure}") from None
    require_possible(facts, where)
    return facts


def _described(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """All that the class and the data say, see `Architecture`."""
    own = family.roles
    named = {key: value for key, value in config.items() if key != "model_type"}  # the class has its own
    skeleton = skeleton_of(named | {"architectures": [family.model_class]})
    modules = {path for layer in skeleton.layers for path, _ in layer.named_modules()}
    for key, path in (("norm", own.norm), ("router", own.router), ("experts", own.experts)):
        if path not in modules:
            raise ArchitectureError(f"roles.{key}: no layer of {family.model_class} has a module {path}; correct it")
    roles = Roles(
        experts=own.experts,
        router_weight=f"{own.router}.weight",
        router_follows=True,
        chosen=skeleton.config.num_experts_per_tok,
        scoring=own.scoring,
        norm=own.norm,
        norm_offset=0,
        readers=own.readers,
        probes=dict.fromkeys(("tokens", "product", "up_down", "large", "fold", "halves"), 0.0),  # as the data mean it
    )
    stored = sort_out(skeleton, _class_headers(skeleton, own.experts, family.float32))
    kinds = [
        Kind(numbers, roles if own.experts in dict(skeleton.layers[numbers[0]].named_modules()) else None, 0.0)
        for numbers in kinds_of_layers(skeleton)
    ]
    result = described(config, skeleton, stored, kinds, roles) | family.model_dump(exclude=BESIDES)
    result["kinds"] = [kind | {"halves": True} for kind in result["kinds"]]
    result["router"]["served"] = own.served
    block, module = result["expert_prefix"].partition(".experts.")[0], own.experts.rpartition(".")[0]
    renamed = {"rename": {block: module}} if block != module else {}
    result["modules"] |= {"aliases": family.aliases} | renamed
    return result | {"mtp": _mtp(family, config, result), "probes": {}}


def _class_headers(skeleton: Skeleton, experts: str, float32: Sequence[str]) -> dict[str, Header]:
    """The headers of the files that the class itself would write, of one of the experts.

    Args:
        experts: the module of the routed experts within a layer.
        float32: names of tensors that are published so, besides those that the class keeps so.
    """
    from transformers.core_model_loading import revert_weight_conversion

    precise = (*float32, *(getattr(skeleton.model, "_keep_in_fp32_modules_strict", None) or ()))
    of_one = {name: t[:1] if f".{experts}." in name else t for name, t in skeleton.parameters.items()}
    written = revert_weight_conversion(skeleton.model, of_one)
    dtypes = {name: "F32" if name.endswith(precise) else "BF16" for name in written}
    return {name: Header(dtypes[name], tuple(tensor.shape)) for name, tensor in written.items()}


def _mtp(family: Family, config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The facts about the layers that predict further tokens, if there are any; puts their number among the sizes."""
    if family.mtp_layer is None:
        return None
    key = family.mtp_layer.layers
    count = config.get(key) or 0
    if type(count) is not int or not 0 <= count <= MOST_MTP_LAYERS:
        raise ArchitectureError(f"{key} is {reprlib.repr(count)}; a whole number from 0 to {MOST_MTP_LAYERS} is needed")
    sizes = facts["sizes"]
    own = {
        name: {
            "shape": [sum(sizes[word]["value"] for word in term.split(" + ")) for term in terms],
            "dtype": "BF16",
            "optional": name in family.mtp_layer.optional,
        }
        for name, terms in family.mtp_layer.tensors.items()
    }
    last = next(kind for kind in reversed(facts["kinds"]) if not kind["dense"])
    layers = range(sizes["layers"]["value"], sizes["layers"]["value"] + count)
    sizes["mtp"] = {"key": key, "value": count}
    return last | {"tensors": last["tensors"] | own, "layers": list(layers)} if count else None
