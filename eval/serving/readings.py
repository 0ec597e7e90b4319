"""Every module that an engine looks up in a quantization_config when it builds a model, with the scheme it gets.

Servers (vLLM, SGLang) fuse q, k and v into one module, gate and up of a dense MLP into another, and all experts of a
layer into a third; transformers looks up each linear layer separately. The router is looked up only by a server that
asks for it in this family, and layers that predict further tokens as speculative decoding does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.architectures.sizes import Sizes

from .config_groups import Refused, Rules, ServedScheme
from .rules import (
    ATTENTION,
    EMBEDDINGS,
    EXPERTS,
    HEAD,
    MLP,
    MTP_EXPERTS,
    MTP_LINEAR,
    MTP_OTHER,
    OUTPUT,
    ROUTER,
    SHARED,
    Engine,
    find,
    find_experts,
    first,
    matches,
    require_kernel,
)

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Reading:
    """The scheme that an engine gives one of its modules.

    Attributes:
        kind: one of KINDS.
        asked: the name under which the engine looks it up.
        members: the checkpoint's modules that go into it; not listed for a layer's experts.
        scheme: None if it is not quantized.
        layer: None outside the decoder layers.
        refused: why the engine stops here; None if it does not.
    """

    kind: str
    asked: str
    members: tuple[str, ...]
    scheme: ServedScheme | None
    layer: int | None = None
    refused: str | None = None


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    return tensor.removesuffix(".weight")


def kind_of(linear: str) -> str:
    """The kind of a kept linear module of a layer."""
    parent, _, last = linear.rpartition(".")
    if last == "o_proj":
        return OUTPUT
    if last not in PROJECTIONS.values():
        return ATTENTION
    return SHARED if "shared_expert" in parent else MLP


CLASSES = {"qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear"}


def fused(linears: Iterable[str], together: Mapping[str, Sequence[str]]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Linear modules as servers build them: name, class and published members, without the layer's prefix.

    Args:
        together: `Engine.fused`.
    """
    built: dict[str, tuple[str, ...]] = {}
    for linear in linears:
        parent, _, last = linear.rpartition(".")
        whole = next((name for name, members in together.items() if last in members), last)
        name = f"{parent}.{whole}"
        built[name] = (*built.get(name, ()), linear)
    return [(name, CLASSES.get(name.rpartition(".")[2], "RowParallelLinear"), parts) for name, parts in built.items()]


def mtp_matrices(facts: Architecture) -> list[str]:
    """What a layer that predicts further tokens has besides linear modules and experts: all stored as they are."""
    return [name for name, tensor in facts.mtp_tensors().items() if len(tensor.shape) == 2]


def server_readings(engine: Engine, facts: Architecture, sizes: Sizes, rules: Rules) -> Iterator[Reading]:
    """Every module that a server looks up, with the scheme it gets."""
    engine = engine.of_family(facts)
    asks_for_router = facts.servers[engine.key].asks_for_router

    def ask(kind: str, name: str, class_name: str, members: tuple[str, ...], layer: int | None = None) -> Reading:
        try:
            if kind in (EXPERTS, MTP_EXPERTS):
                scheme = find_experts(engine, facts, name, rules)
            else:
                scheme = find(engine, name, class_name, rules, rules.targets)
            require_kernel(engine, scheme, kind, rules)
        except Refused as refused:
            return Reading(kind, name, members, None, layer, str(refused))
        return Reading(kind, name, members, scheme, layer)

    for layer in (*range(sizes["layers"]), *sizes.mtp):
        dense, mtp = layer in sizes.dense, layer in sizes.mtp
        prefix = engine.layer_prefix(facts, sizes, layer)
        linears = facts.mtp_linears() if mtp else facts.linears(dense)
        for name, class_name, members in fused(linears, engine.fused):
            full = tuple(facts.layer(layer, member) for member in members)
            yield ask(MTP_LINEAR if mtp else kind_of(members[0]), prefix + name, class_name, full, layer)
        if dense:
            continue
        experts = engine.expert_prefix(facts, sizes, layer)
        yield ask(MTP_EXPERTS if mtp else EXPERTS, experts, engine.expert_class, (), layer)
        for tensor in mtp_matrices(facts) if mtp else [facts.router.tensor]:
            kind, name = MTP_OTHER if mtp else ROUTER, module_of(tensor)
            stored = (facts.layer(layer, name),)
            # Today's servers build what only such a layer has without asking. One that stops where nothing matches
            # might ask one day: `ignore` has to name it.
            if asks_for_router if tensor == facts.router.tensor else engine.unmatched_is_error:
                yield ask(kind, prefix + name, "ReplicatedLinear", stored, layer)
            else:
                yield Reading(kind, prefix + name, stored, None, layer)
    for kind, tensor, class_name in (
        (HEAD, facts.head, "ParallelLMHead"),
        (EMBEDDINGS, facts.embedding, "VocabParallelEmbedding"),
    ):
        name = module_of(tensor)
        if kind in engine.plain_kinds:
            yield Reading(kind, name, (name,), None)
        else:
            yield ask(kind, name, class_name, (name,))


def transformers_readings(facts: Architecture, sizes: Sizes, rules: Rules) -> Iterator[Reading]:
    """Every module that transformers looks up: each linear layer separately; all layers' experts share one group."""

    def linear(kind: str, name: str, class_name: str = "Linear", layer: int | None = None) -> Reading:
        return Reading(kind, name, (name,), _transformers_scheme(name, class_name, rules), layer)

    for layer in range(sizes["layers"]):
        dense = layer in sizes.dense
        for name in facts.linears(dense):
            yield linear(kind_of(name), facts.layer(layer, name), layer=layer)
        if dense:
            continue
        yield Reading(EXPERTS, facts.layer(layer, facts.modules.experts), (), _transformers_experts(rules), layer)
        router = module_of(facts.layer(layer, facts.router.tensor))
        yield Reading(ROUTER, router, (router,), None, layer)  # its class is not nn.Linear, so it is never quantized
    yield linear(HEAD, module_of(facts.head))
    yield linear(EMBEDDINGS, module_of(facts.embedding), "Embedding")


def _transformers_scheme(name: str, class_name: str, rules: Rules) -> ServedScheme | None:
    if any(matches(name, entry) or entry == class_name for entry in rules.ignore):
        return None
    ordered = sorted(rules.targets, key=lambda target: ("re:" in target, target))
    chosen = first(name, ordered) or next((target for target in ordered if target == class_name), None)
    return rules.targets[chosen] if chosen else None


def names_experts(targets: Iterable[str]) -> bool:
    """Whether transformers would use a group with these targets for the experts."""
    return any(target.startswith("re:") and "experts" in target for target in targets)


def _transformers_experts(rules: Rules) -> ServedScheme | None:
    for targets, scheme in rules.groups:
        for target in targets:
            if target.startswith("re:") and "experts" in target:
                return replace(scheme, target=target)
    for targets, scheme in rules.groups:
        for target in targets:
            if not target.startswith("re:"):
                return replace(scheme, target=target)
    return rules.groups[0][1] if rules.groups else None
