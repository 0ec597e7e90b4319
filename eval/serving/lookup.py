"""The modules of a model, and the scheme that each engine looks up for them when it builds the model.

Servers fuse q, k and v into one module, gate and up of a dense MLP into another, and all experts of a layer into a
third. transformers looks up every linear layer separately, by name and then by class, and has one scheme for all
experts: the first group with a `re:` target that contains "experts", even if that expression does not match them. The
router is looked up only by servers that do so in this family. MTP layers are built by servers only, for speculative
decoding. (transformers: version 5.17.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes

from .config import Refused, Rules, ServedScheme
from .engines import (
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
    require_kernel,
)

TRANSFORMERS = "transformers"
MTP = (MTP_LINEAR, MTP_EXPERTS, MTP_OTHER)
CLASSES = {  # by the server's name for a fused module, or by kind
    "qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear", HEAD: "ParallelLMHead",
    EMBEDDINGS: "VocabParallelEmbedding", ROUTER: "ReplicatedLinear", MTP_OTHER: "ReplicatedLinear",
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A published module that an engine may quantize.

    Attributes:
        name: without `.weight`.
        kind: one of KINDS.
        shape: (outputs, inputs).
        layer: None outside the decoder layers.
        optional: some models of the family lack it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    layer: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Lookup:
    """The answer to an engine's query.

    Attributes:
        kind: one of KINDS.
        asked: the name that the engine looks up.
        members: the published modules that it loads into this one.
        scheme: None if it is not quantized.
        refused: the reason if the engine stops here.
    """

    kind: str
    asked: str
    members: Sequence[Module]
    scheme: ServedScheme | None
    refused: str | None = None

    @property
    def answer(self) -> str:
        """The scheme in words, `plain` or `refused`."""
        return "refused" if self.refused is not None else str(self.scheme or "plain")


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    return tensor.removesuffix(".weight")


def model_modules(facts: Architecture, sizes: Sizes) -> list[Module]:
    """Every matrix of a model that an engine may quantize."""
    modules: list[Module] = []
    for layer in (*range(sizes["layers"]), *sizes.mtp):
        dense, mtp = layer in sizes.dense, layer in sizes.mtp
        for name, terms in (facts.mtp_linears() if mtp else facts.linears(dense)).items():
            kind = MTP_LINEAR if mtp else _linear_kind(name)
            modules.append(Module(facts.layer(layer, name), kind, sizes.shape(terms), layer))
        if dense:
            continue
        for name, tensor in (facts.mtp_tensors() if mtp else facts.tensors(dense)).items():
            if (mtp and len(tensor.shape) == 2) or name == facts.router.tensor:
                kind, shape = MTP_OTHER if mtp else ROUTER, sizes.shape(tensor.shape)
                modules.append(Module(module_of(facts.layer(layer, name)), kind, shape, layer, tensor.optional))
        shapes = {matrix: sizes.shape(facts.expert_linears[matrix].shape) for matrix in MATRICES}
        kind = MTP_EXPERTS if mtp else EXPERTS
        for expert in range(sizes["experts"]):
            modules += [Module(facts.expert(layer, expert, m), kind, shapes[m], layer) for m in MATRICES]
    for kind, name in ((HEAD, facts.head), (EMBEDDINGS, facts.embedding)):
        modules.append(Module(module_of(name), kind, sizes.shape(facts.outside[name].shape)))
    return modules


def _linear_kind(linear: str) -> str:
    parent, _, last = linear.rpartition(".")
    if last == "o_proj":
        return OUTPUT
    if last not in PROJECTIONS.values():
        return ATTENTION
    return SHARED if "shared_expert" in parent else MLP


def _built(engine: Engine, facts: Architecture, sizes: Sizes, modules: Iterable[Module]) -> dict[str, list[Module]]:
    """The modules that a server builds: its name for each, and the published modules in it."""
    built: dict[str, list[Module]] = {}
    for module in modules:
        name = module.name
        if module.layer is not None:
            prefix = engine.layer_prefix(facts, sizes, module.layer)
            short = name.removeprefix(facts.layer(module.layer, ""))
            parent, _, last = short.rpartition(".")
            if module.kind in (EXPERTS, MTP_EXPERTS):
                short = facts.servers[engine.key].experts
            elif module.kind not in (ROUTER, MTP_OTHER):
                short = f"{parent}.{next((whole for whole, parts in engine.fused.items() if last in parts), last)}"
            name = prefix + short
        built.setdefault(name, []).append(module)
    return built


def class_of(kind: str, name: str) -> str:
    """The class of a server's module that holds no experts."""
    return CLASSES.get(name.rpartition(".")[2]) or CLASSES.get(kind, "RowParallelLinear")


def is_looked_up(engine: Engine, facts: Architecture, module: Module) -> bool:
    """Whether a server consults the config for a module.

    The servers of today build the modules that only an MTP layer has without consulting it. One that refuses unmatched
    modules may start to, so `ignore` must name them.
    """
    if module.layer is not None and module.kind in (ROUTER, MTP_OTHER):
        is_router = module.name == module_of(facts.layer(module.layer, facts.router.tensor))
        return facts.servers[engine.key].asks_for_router if is_router else engine.unmatched_is_error
    return module.kind not in engine.plain_kinds


def server_lookups(
    engine: Engine, facts: Architecture, sizes: Sizes, rules: Rules, modules: Iterable[Module]
) -> Iterator[Lookup]:
    """Every module that a server builds, with the scheme it gets.

    Args:
        modules: from `model_modules`.
    """
    engine = engine.of_family(facts)
    for name, members in _built(engine, facts, sizes, modules).items():
        kind = members[0].kind
        scheme = None
        try:
            if kind in (EXPERTS, MTP_EXPERTS):
                scheme = find_experts(engine, facts, name, rules)
            elif is_looked_up(engine, facts, members[0]):
                scheme = find(engine, name, class_of(kind, name), rules, rules.targets)
            if scheme is not None:
                require_kernel(engine, scheme, kind, rules)
        except Refused as refused:
            yield Lookup(kind, name, members, None, str(refused))
        else:
            yield Lookup(kind, name, members, scheme)


def transformers_lookups(facts: Architecture, rules: Rules, modules: Iterable[Module]) -> Iterator[Lookup]:
    """The same for transformers."""
    experts: dict[str, list[Module]] = {}
    for module in modules:
        if module.kind == EXPERTS:
            assert module.layer is not None
            name = facts.layer(module.layer, facts.modules.experts)
            experts.setdefault(name, []).append(module)
        elif module.kind == ROUTER:
            yield Lookup(ROUTER, module.name, [module], None)  # its class is not nn.Linear, so it is never quantized
        elif module.kind not in MTP:
            class_name = "Embedding" if module.kind == EMBEDDINGS else "Linear"
            yield Lookup(module.kind, module.name, [module], _transformers_scheme(module.name, class_name, rules))
    for name, members in experts.items():
        yield Lookup(EXPERTS, name, members, _transformers_experts(rules))


def _transformers_scheme(name: str, class_name: str, rules: Rules) -> ServedScheme | None:
    if first(name, rules.ignore) or class_name in rules.ignore:
        return None
    ordered = sorted(rules.targets, key=lambda target: ("re:" in target, target))
    chosen = first(name, ordered) or next((target for target in ordered if target == class_name), None)
    return rules.targets[chosen] if chosen else None


def _transformers_experts(rules: Rules) -> ServedScheme | None:
    pairs = [(target, scheme) for targets, scheme in rules.groups for target in targets]
    named = [pair for pair in pairs if names_experts(pair[0])]
    classes = [pair for pair in pairs if not pair[0].startswith("re:")]
    return next((replace(scheme, target=target) for target, scheme in (*named, *classes, *pairs)), None)


def names_experts(target: str) -> bool:
    """Whether transformers would use a group with this target for the experts."""
    return target.startswith("re:") and "experts" in target
