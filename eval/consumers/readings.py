"""Everything that an engine asks of a quantization_config when it builds a model, with the answers.

Servers fuse q, k and v into one layer and all experts of a layer into one; transformers asks for each
linear layer by itself. The router is built without quantization everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from quantizers.architectures.architecture import Architecture

from .rules import (
    ATTENTION,
    EMBEDDINGS,
    EXPERTS,
    FUSED,
    HEAD,
    OUTPUT,
    ROUTER,
    Engine,
    Refused,
    Rules,
    Scheme,
    find,
    find_experts,
    first,
    matches,
    require_kernel,
)

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Reading:
    """What an engine makes of one module of its own.

    Attributes:
        kind: one of KINDS.
        asked: the name that it asks for.
        members: the checkpoint's modules that go into it; none are listed for a layer's experts.
        scheme: None where it is not quantized.
        layer: None outside the layers.
        refused: why the engine stops here; None where it does not.
    """

    kind: str
    asked: str
    members: tuple[str, ...]
    scheme: Scheme | None
    layer: int | None = None
    refused: str | None = None


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    return tensor.removesuffix(".weight")


def kind_of(linear: str) -> str:
    """ATTENTION for what servers fuse into one layer, else OUTPUT."""
    return ATTENTION if linear.rpartition(".")[2] in FUSED["qkv_proj"] else OUTPUT


def attention(facts: Architecture) -> list[tuple[str, str, tuple[str, ...]]]:
    """A layer's linears as servers build them: name, class and published members, without the layer's prefix."""
    fused: dict[str, tuple[str, ...]] = {}
    for name in facts.linears:
        parent = name.rpartition(".")[0]
        whole = f"{parent}.qkv_proj" if kind_of(name) == ATTENTION else name
        fused[whole] = (*fused.get(whole, ()), name)
    return [
        (name, "QKVParallelLinear" if len(members) > 1 else "RowParallelLinear", members)
        for name, members in fused.items()
    ]


def server_readings(engine: Engine, facts: Architecture, layers: int, rules: Rules) -> Iterator[Reading]:
    """Everything a server asks for, with its answer."""

    def ask(kind: str, name: str, class_name: str, members: tuple[str, ...], layer: int | None = None) -> Reading:
        if kind in engine.plain_kinds:
            return Reading(kind, name, members, None, layer)
        try:
            if kind == EXPERTS and layer is not None:
                scheme = find_experts(engine, facts, layer, rules)
            else:
                scheme = find(engine, name, class_name, rules, rules.targets)
            require_kernel(engine, scheme, kind, rules)
        except Refused as refused:
            return Reading(kind, name, members, None, layer, str(refused))
        return Reading(kind, name, members, scheme, layer)

    for layer in range(layers):
        for name, class_name, members in attention(facts):
            kind = ATTENTION if len(members) > 1 else OUTPUT
            full = tuple(facts.layer(layer, member) for member in members)
            yield ask(kind, facts.layer(layer, name), class_name, full, layer)
        yield ask(EXPERTS, engine.expert_prefix(facts, layer), engine.expert_class, (), layer)
        router = module_of(facts.layer(layer, facts.fold.router))
        yield ask(ROUTER, router, "GateLinear", (router,), layer)
    head, embedding = module_of(facts.head), module_of(facts.embedding)
    yield ask(HEAD, head, "ParallelLMHead", (head,))
    yield ask(EMBEDDINGS, embedding, "VocabParallelEmbedding", (embedding,))


def transformers_readings(facts: Architecture, layers: int, rules: Rules) -> Iterator[Reading]:
    """Everything transformers decides: each linear layer by itself, the experts by their group alone."""

    def linear(kind: str, name: str, class_name: str = "Linear", layer: int | None = None) -> Reading:
        return Reading(kind, name, (name,), _transformers_scheme(name, class_name, rules), layer)

    for layer in range(layers):
        for name in facts.linears:
            yield linear(kind_of(name), facts.layer(layer, name), layer=layer)
        yield Reading(EXPERTS, facts.layer(layer, facts.modules.experts), (), _transformers_experts(rules), layer)
        router = module_of(facts.layer(layer, facts.fold.router))
        yield Reading(ROUTER, router, (router,), None, layer)  # a class of its own, no nn.Linear
    yield linear(HEAD, module_of(facts.head))
    yield linear(EMBEDDINGS, module_of(facts.embedding), "Embedding")


def _transformers_scheme(name: str, class_name: str, rules: Rules) -> Scheme | None:
    if any(matches(name, entry) or entry == class_name for entry in rules.ignore):
        return None
    ordered = sorted(rules.targets, key=lambda target: ("re:" in target, target))
    chosen = first(name, ordered) or next((target for target in ordered if target == class_name), None)
    return rules.targets[chosen] if chosen else None


def names_experts(targets: Iterable[str]) -> bool:
    """Whether transformers would take a group with these targets for that of the experts."""
    return any(target.startswith("re:") and "experts" in target for target in targets)


def _transformers_experts(rules: Rules) -> Scheme | None:
    for targets, scheme in rules.groups:
        for target in targets:
            if target.startswith("re:") and "experts" in target:
                return replace(scheme, target=target)
    for targets, scheme in rules.groups:
        for target in targets:
            if not target.startswith("re:"):
                return replace(scheme, target=target)
    return rules.groups[0][1] if rules.groups else None
