"""The facts about a model of a family of which there is data: laid over what its class in transformers says.

Shapes and places are those of the tensors that the class itself would write. Nothing is probed, no files are needed.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from quantizers.system.errors import ArchitectureError

from .architecture import Architecture, Family
from .config_class import refusal
from .contradictions import refuse_another_type
from .derive import KEYS, Kind, described, skeleton_of
from .roles import TOKENS, Roles, kinds_of_layers, run_without_numbers
from .skeleton import FAILURES, Skeleton
from .stored_tensors import Header, sort_out, tied_parameters

BESIDES = {"float32", "mtp_layer", "roles", "aliases", "config"}  # keys of a family that no architecture has
# A config.json with larger sizes than these is broken or hostile.
LIMITS = {"layers": 1000, "experts": 4096, "vocabulary": 10_000_000}
LARGEST_SIZE = 1 << 20
OF_SIZES = ("_size", "_dim", "_rank", "_heads", "_layers", "_experts")  # ends of the keys of all others
MOST_EXPERTS = 200_000  # over all layers
MOST_MTP_LAYERS = 16


def family_architecture(family: Family, config: dict[str, Any], stored: Collection[str] = ()) -> Architecture:
    """The facts about a model of a family, from its config.json alone.

    Args:
        stored: names of tensors in its files: of tied matrices that the class itself would write once, those count that
            are stored.

    Raises:
        ArchitectureError: config.json contradicts itself or the data, or its class cannot be made of it.
    """
    _require_sane(config)
    refuse_another_type(config)
    for key, computed in family.asserts.items():
        value = config.get(key)
        if value is not None and value != computed:
            raise ArchitectureError(
                "",
                f"{key} is {reprlib.repr(value)}, but {family.model_class} in transformers does not read it and "
                f"computes what {computed!r} means; the model would be computed wrongly and is refused",
                f"give another model; or if this one was trained so, write {json.dumps(computed)} there",
            )
    named = {key: value for key, value in config.items() if key != "model_type"}  # the class has its own
    skeleton = skeleton_of(named | {"architectures": [family.model_class]})
    refused: ArchitectureError | None = None
    try:
        _run_without_numbers(skeleton)
    except FAILURES as failure:
        refused = refusal(type(skeleton.model), named, _run_without_numbers, failure)
        if refused.place:
            raise refused from None
    try:
        facts = Architecture.model_validate(_with_data(family, config, skeleton, stored))
    except ValidationError as failure:
        raise ArchitectureError("", failure.errors()[0]["msg"], "correct the data about the family") from None
    _require_possible(facts)
    if refused is not None:
        raise refused
    return facts


def _run_without_numbers(skeleton: Skeleton) -> None:
    """Run a layer of each kind, so that what its class cannot compute is seen before a run begins."""
    for first, *_ in kinds_of_layers(skeleton):
        call = skeleton.calls(TOKENS)[first]
        run_without_numbers(skeleton, first, call.of(call.states))


def _with_data(family: Family, config: dict[str, Any], skeleton: Skeleton, names: Collection[str]) -> dict[str, Any]:
    """All that the class, the data laid over it, and the names of stored tensors say, see `Architecture`."""
    own = family.roles
    modules = {path for layer in skeleton.layers for path, _ in layer.named_modules()}
    for key, path in (("norm", own.norm), ("router", own.router), ("experts", own.experts)):
        if path not in modules:
            raise ArchitectureError(
                f"roles.{key}", f"no layer of {family.model_class} has a module {path}", "correct it"
            )
    roles = Roles(
        experts=own.experts,
        router_weight=f"{own.router}.weight",
        router=own.router,
        router_follows=True,
        chosen=skeleton.config.num_experts_per_tok,
        scoring=own.scoring,
        norm=own.norm,
        norm_offset=0,
        readers=own.readers,
        probes=dict.fromkeys(("tokens", "product", "up_down", "large", "fold", "halves"), 0.0),  # as the data mean it
    )
    tied = tied_parameters(skeleton)
    headers = _class_headers(skeleton, own.experts, family.float32)
    stored = sort_out(skeleton, {name: header for name, header in headers.items() if name not in tied - set(names)})
    heads = family.kv_cache.rows_of[0].rpartition(".")[0] if family.kv_cache and family.kv_cache.divided else None
    kinds = [
        Kind(numbers, roles if own.experts in dict(skeleton.layers[numbers[0]].named_modules()) else None, 0.0, heads)
        for numbers in kinds_of_layers(skeleton)
    ]
    result = described(config, skeleton, stored, kinds, roles) | family.model_dump(exclude=BESIDES)
    result["kinds"] = [kind | {"halves": True} for kind in result["kinds"]]
    result["router"]["served"] = own.served
    block, module = result["expert_prefix"].partition(".experts.")[0], own.experts.rpartition(".")[0]
    renamed = {"rename": {block: module}} if block != module else {}
    result["modules"] |= {"aliases": family.aliases} | renamed
    return result | {"mtp": _mtp(family, config, result, tied=bool(tied)), "probes": {}}


def _class_headers(skeleton: Skeleton, experts: str, float32: Sequence[str]) -> dict[str, Header]:
    """The headers of the files that the class itself would write, of one of the experts.

    Args:
        float32: names of tensors that are published so. (What a class keeps so in memory is another thing, and differs
            between versions of transformers.)
    """
    from transformers.core_model_loading import revert_weight_conversion

    of_one = {name: t[:1] if f".{experts}." in name else t for name, t in skeleton.parameters.items()}
    written = revert_weight_conversion(skeleton.model, of_one)
    dtypes = {name: "F32" if name.endswith(tuple(float32)) else "BF16" for name in written}
    return {name: Header(dtypes[name], tuple(tensor.shape)) for name, tensor in written.items()}


def _mtp(family: Family, config: Mapping[str, Any], facts: Mapping[str, Any], *, tied: bool) -> dict[str, Any] | None:
    """The facts about the layers that predict further tokens, if there are any; puts their number among the sizes.

    Where head and embeddings are `tied`, such a layer may do without matrices of the vocabulary of its own.
    """
    if family.mtp_layer is None:
        return None
    key = family.mtp_layer.layers
    count = config.get(key) or 0
    if type(count) is not int or not 0 <= count <= MOST_MTP_LAYERS:
        raise ArchitectureError(
            "", f"{key} is {reprlib.repr(count)}", f"a whole number from 0 to {MOST_MTP_LAYERS} is needed"
        )
    sizes = facts["sizes"]
    own = {
        name: {
            "shape": [sum(sizes[word]["value"] for word in term.split(" + ")) for term in terms],
            "dtype": "BF16",
            "optional": name in family.mtp_layer.optional or (tied and "vocabulary" in terms),
        }
        for name, terms in family.mtp_layer.tensors.items()
    }
    last = next(kind for kind in reversed(facts["kinds"]) if not kind["dense"])
    layers = range(sizes["layers"]["value"], sizes["layers"]["value"] + count)
    sizes["mtp"] = {"key": key, "value": count}
    return last | {"tensors": last["tensors"] | own, "layers": list(layers)} if count else None


def _require_sane(config: Mapping[str, Any]) -> None:
    """Refuse a config.json of which no model can be made, since a size is no whole number, or absurd."""
    limits = {key: LIMITS.get(name, LARGEST_SIZE) for name, keys in KEYS.items() for key in keys}
    for key, value in config.items():
        limit = limits.get(key, LARGEST_SIZE)
        known = key in limits and value is not None and (type(value) is not int or value < 1)
        if known or (type(value) is int and value > limit and (key in limits or key.endswith(OF_SIZES))):
            raise ArchitectureError(
                "", f"{key} is {reprlib.repr(value)}", f"a whole number from 1 to {limit} is needed"
            )


def _require_possible(facts: Architecture) -> None:
    """Refuse a model whose sizes contradict each other, naming their keys in config.json."""
    keys = {name: f"{size.key} {size.value}" for name, size in facts.sizes.items()}
    groups, chosen_groups = facts.groups
    problem = None
    if facts.top_k > facts.num_experts:
        problem = f"{keys['chosen']} is larger than {keys['experts']}"
    elif groups > 1 and (facts.num_experts % groups or facts.num_experts < 2 * groups):
        problem = (
            f"{keys['experts']} are not two or more in each of {keys['groups']} groups, of which the router adds up "
            "the best two"
        )
    elif chosen_groups > groups:
        problem = f"{keys['chosen_groups']} is larger than {keys['groups']}"
    elif facts.top_k > chosen_groups * facts.num_experts // groups:
        problem = f"{keys['chosen_groups']} of {groups} groups have fewer experts than {keys['chosen']}"
    elif facts.num_layers * facts.num_experts > MOST_EXPERTS:
        problem = f"{keys['layers']} with {keys['experts']} is more than any model has"
    elif "kv_heads" in keys and facts.num_heads % facts.num_kv_heads:
        problem = f"{keys['kv_heads']} does not divide {keys['heads']}"
    if problem:
        raise ArchitectureError("", problem, "correct this file")
