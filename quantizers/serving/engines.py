"""Which scheme of a quantization_config an engine gives each module: the rules of vLLM, SGLang and transformers.

A target of a config group is `re:` and a regular expression (matched from the start), a module's name, or a class name
such as "Linear". Servers fuse q, k and v into one module, gate and up of a dense MLP into another, and all experts of a
layer into a third. They differ in the names that they look up, and in the order in which they try targets:

    vLLM     name, then the members of a fused layer, then the class; no match: not quantized
    SGLang   name, class, members; no match: an error. Head and embedding are never looked up; an entry of `ignore` also
             covers names that end with it; integer experts need `pack-quantized` as the whole checkpoint's format

Both look up expert 0 only, and its three matrices must get the same scheme. vLLM uses the family's published names for
them since 0.32 (w1/w3/w2 in MiniMax-M2), before that gate_proj/up_proj/down_proj, as SGLang does. The module that holds
the experts, further fused modules, and whether the router is looked up are in the architecture spec. MTP layers are
looked up for speculative decoding only: by vLLM under their number, by SGLang under a separate prefix.

transformers looks up every linear layer separately, by name and then by class, and has one scheme for all experts: the
first group with a `re:` target that contains "experts", even if that expression does not match them.

kernels.py says which of the schemes that an engine reads it also computes with.

From the sources of vLLM 0.15 to 0.33 (before about 0.23 it tried the class before the members), SGLang 0.5.23 and
transformers 5.17; ask_vllm.py compares these rules with an installed vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quantizers.architectures.architecture import Architecture, ServerFacts, ServerName
from quantizers.architectures.fused import FUSED, FUSED_IN_SOME, NO_MATRIX
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.formats.format import QuantizedFormat, expert_formats
from quantizers.formats.fp8 import Fp8Blocks, Fp8Rows
from quantizers.formats.mxfp4 import Mxfp4
from quantizers.formats.mxfp8 import Mxfp8

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

ATTENTION = "attention q,k,v"
OUTPUT = "attention o"
MLP = "dense MLP"
SHARED = "shared experts"
EXPERTS = "experts"
ROUTER = "router"
HEAD = "lm_head"
EMBEDDINGS = "embeddings"
MTP_LINEAR = "MTP linear"
MTP_EXPERTS = "MTP experts"
MTP_OTHER = "MTP other"  # a router of MTP, and the modules that only such a layer has
KINDS = (
    ATTENTION, OUTPUT, MLP, SHARED, EXPERTS, ROUTER, HEAD, EMBEDDINGS, MTP_LINEAR, MTP_EXPERTS, MTP_OTHER,
)  # fmt: skip
# Formats under which servers assume that a scheme also quantizes activations, FP8 among them.
ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
PACKED = "pack-quantized"
REFUSED = "refused"
TRANSFORMERS = "transformers"
CLASSES = {  # by the server's name for a fused module, or by kind
    "qkv_proj": "QKVParallelLinear", "gate_up_proj": "MergedColumnParallelLinear", HEAD: "ParallelLMHead",
    EMBEDDINGS: "VocabParallelEmbedding", ROUTER: "ReplicatedLinear", MTP_OTHER: "ReplicatedLinear",
}  # fmt: skip


# Declared schemes ---------------------------------------------------------------------------------------------------


class Refused(Exception):
    """An engine refuses a module or section; the message says why. A finding, not an error of this program."""


@dataclass(frozen=True)
class ServedScheme:
    """The scheme of a config group. Two are equal if engines treat them alike, whichever group they come from."""

    type: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    symmetric: bool
    dynamic: bool
    activations: str | None = None
    scales: str | None = None  # the scale_dtype of FP8 in groups, by which vLLM knows MXFP8; of others nothing reads it
    format: str = ""
    group: str = field(default="", compare=False)
    target: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.form is not None:
            return str(self.form)
        name = {"int": "INT", "float": "FP"}.get(self.type, self.type) + str(self.bits)
        if self.strategy == "block" and self.block:
            return f"{name} block {self.block[0]}x{self.block[1]}"
        return f"{name} group {self.group_size}" if self.strategy == "group" else f"{name} per {self.strategy}"

    @cached_property
    def form(self) -> QuantizedFormat | None:
        """The stored format that it declares; None if this program never writes it."""
        weights = {"type": self.type, "num_bits": self.bits, "strategy": self.strategy, "group_size": self.group_size}
        weights |= {"block_structure": self.block, "scale_dtype": self.scales}
        inputs = json.loads(self.activations) if self.activations else None
        formats: tuple[type[QuantizedFormat], ...] = (*expert_formats().values(), Mxfp4, Mxfp8, Fp8Blocks, Fp8Rows)
        for known in formats:
            if form := known.of_config_group(weights, inputs):
                return form
        return None

    @property
    def kind(self) -> str | None:
        """That of its stored format, by which kernels.py lists kernels; None if this program never writes it."""
        return None if self.form is None else self.form.kind

    @property
    def origin(self) -> str:
        """The group and target it comes from, for messages."""
        return f"group {self.group!r}, target {self.target!r}"


def scheme_of(weights: QuantizationArgs) -> ServedScheme:
    """The scheme of weights as compressed-tensors and vLLM hold it."""
    keys = ("type", "num_bits", "strategy", "group_size", "block_structure", "symmetric", "dynamic")
    fields = weights.model_dump(mode="json")
    kind, bits, strategy, group, block, symmetric, dynamic = (fields[key] for key in keys)
    scales = fields["scale_dtype"] if (kind, bits, strategy) == ("float", 8, "group") else None
    block = tuple(block) if block else None
    return ServedScheme(kind, bits, strategy, group, block, symmetric, bool(dynamic), scales=scales)


def declared_scheme(group: Mapping[str, Any]) -> ServedScheme:
    """The scheme of a config group's `weights` and `input_activations`."""
    from compressed_tensors.quantization import QuantizationArgs

    activations = group.get("input_activations")
    return replace(
        scheme_of(QuantizationArgs.model_validate(group["weights"])),
        activations=json.dumps(activations, sort_keys=True) if activations else None,
    )


@dataclass(frozen=True)
class Rules:
    """A parsed quantization_config.

    Attributes:
        pairs: each target and its scheme, in file order.
        targets: the same; a repeated target keeps its first place and takes the later scheme.
        ignore: names and expressions of modules that are not quantized.
        format: of the whole checkpoint.
    """

    pairs: Sequence[tuple[str, ServedScheme]]
    targets: Mapping[str, ServedScheme]
    ignore: tuple[str, ...]
    format: str


def read_rules(section: Mapping[str, Any]) -> Rules:
    """Parse a quantization_config, as tolerantly as the servers do; Refused without the structure that they need."""
    default_format = str(section.get("format"))
    pairs: list[tuple[str, ServedScheme]] = []
    try:
        for name, group in section["config_groups"].items():
            scheme = replace(declared_scheme(group), format=group.get("format") or default_format, group=name)
            pairs += [(target, replace(scheme, target=target)) for target in group["targets"]]
        targets, ignore = dict(pairs), tuple(section.get("ignore") or ())
        for pattern in (*targets, *ignore):
            if pattern.startswith("re:"):
                re.compile(pattern[3:])
    except re.error as failure:
        raise Refused(f"{failure.pattern!r} is not a regular expression ({failure.msg})") from None
    except (AttributeError, KeyError, TypeError, ValueError) as failure:  # pydantic's errors among them
        raise Refused(f"config_groups has an unexpected structure ({' '.join(str(failure).split())})") from None
    return Rules(pairs, targets, ignore, default_format)


# Engines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A server.

    Attributes:
        key: of the server in a family's facts; `name`: with the versions it stands for.
        own_names: it looks up experts' matrices by the family's names (w1/w3/w2), otherwise by PROJECTIONS; and it also
            tries an expression in `ignore` on a fused layer's own name. As vLLM does since 0.32.
        fused: the members of each linear module that it builds as one, by the last words of both their names.
    """

    key: ServerName
    name: str
    own_names: bool = False
    fused: Mapping[str, Sequence[str]] = field(default_factory=lambda: FUSED, hash=False)

    @property
    def is_sglang(self) -> bool:
        """Whether the rules of SGLang hold, otherwise those of vLLM."""
        return self.key == "sglang"

    def expert_names(self, facts: Architecture) -> tuple[str, ...]:
        """The names under which it looks up gate, up and down; without a gate vLLM looks up a third all the same."""
        if not self.own_names:
            return tuple(PROJECTIONS.values())
        names = tuple(linear.name for linear in facts.expert_linears.values())
        return names if "gate" in facts.expert_linears else (*names, NO_MATRIX)


VLLM = Engine("vllm", "vLLM 0.32+", own_names=True)
VLLM_BEFORE = Engine("vllm", "vLLM 0.14-0.31")
SGLANG = Engine("sglang", "SGLang")
SERVERS = (VLLM, VLLM_BEFORE, SGLANG)
# The first and the last version of whose sources the rules in this room were read, by distribution.
READ = {"vllm": ("0.15", "0.33"), "sglang": ("0.5.23", "0.5.23"), "kt-kernel": ("0.7.2", "0.7.2")}
# For a family of which no server is known: the rules of vLLM, for modules under their published names.
UNKNOWN_SERVER = Engine("vllm", "vLLM's rules for published names", own_names=True)


@dataclass(frozen=True)
class Module:
    """A published module that an engine may quantize; `shape` is (outputs, inputs), `kind` one of KINDS.

    `layer` is None outside the decoder layers; some models of the family lack an `optional` one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    layer: int | None = None
    optional: bool = False


@dataclass(frozen=True)
class Lookup:
    """The answer to an engine's query for the name `asked`, under which it loads the published modules `members`.

    `scheme` is None if they are not quantized, and `refused` the reason if the engine stops here.
    """

    kind: str
    asked: str
    members: Sequence[Module]
    scheme: ServedScheme | None
    refused: str | None = None

    @property
    def answer(self) -> str:
        """The scheme in words, `plain` or REFUSED."""
        return REFUSED if self.refused is not None else str(self.scheme or "plain")


def module_of(tensor: str) -> str:
    """The module that a weight belongs to."""
    return tensor.removesuffix(".weight")


def model_modules(facts: Architecture) -> list[Module]:
    """Every matrix of a model that an engine may quantize."""
    modules: list[Module] = []
    for layer in (*range(facts.num_layers), *facts.mtp_layers):
        mtp, here = layer in facts.mtp_layers, facts.of_layer(layer)
        for name, shape in here.linears.items():
            parent, _, last = name.rpartition(".")
            kind = OUTPUT if last == "o_proj" else ATTENTION
            if last in PROJECTIONS.values():
                kind = SHARED if "shared_expert" in parent else MLP
            modules.append(Module(facts.layer(layer, name), MTP_LINEAR if mtp else kind, shape, layer))
        if layer in facts.dense:
            continue
        for name, tensor in here.tensors.items():
            if (mtp and len(tensor.shape) == 2) or name == facts.router.tensor:
                kind, module = MTP_OTHER if mtp else ROUTER, module_of(facts.layer(layer, name))
                modules.append(Module(module, kind, tensor.shape, layer, tensor.optional))
        kind = MTP_EXPERTS if mtp else EXPERTS
        for expert in range(facts.num_experts):
            for matrix in facts.matrices:
                shape = facts.expert_linears[matrix].shape
                modules.append(Module(facts.expert(layer, expert, matrix), kind, shape, layer))
    for kind, name in ((HEAD, facts.head), (EMBEDDINGS, facts.embedding)):
        modules.append(Module(module_of(name), kind, facts.outside[name].shape))
    return modules


def server_facts(engine: Engine, facts: Architecture) -> ServerFacts:
    """Facts about a server; if it is unknown, assume the published names and all fusions that any server makes."""
    if engine.key in facts.servers:
        return facts.servers[engine.key]
    experts = facts.expert_prefix.partition(".{expert}")[0]
    return ServerFacts(experts=experts, asks_for_router=True, fused={k: list(v) for k, v in FUSED_IN_SOME.items()})


def _built(engine: Engine, facts: Architecture, modules: Iterable[Module]) -> dict[str, list[Module]]:
    """The modules that a server builds: its name for each, and the published modules in it."""
    server, modules = server_facts(engine, facts), list(modules)
    names, built = {module.name for module in modules}, dict[str, list[Module]]()
    for module in modules:
        name = module.name
        if module.layer is not None:
            prefix = facts.layer(module.layer, "")
            name = name.removeprefix(prefix)
            parent, _, last = name.rpartition(".")
            if module.kind in (EXPERTS, MTP_EXPERTS):
                name = server.experts
            elif module.kind not in (ROUTER, MTP_OTHER):
                for fused, members in engine.fused.items():
                    if last in members and names.issuperset(f"{prefix}{parent}.{member}" for member in members):
                        name = f"{parent}.{fused}"
                        break
            in_mtp = module.layer in facts.mtp_layers and server.mtp_prefix is not None
            name = f"{server.mtp_prefix if in_mtp else prefix}{name}"
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
        return server_facts(engine, facts).asks_for_router if is_router else engine.is_sglang
    return not (engine.is_sglang and module.kind in (HEAD, EMBEDDINGS))


def server_lookups(engine: Engine, facts: Architecture, rules: Rules, modules: Iterable[Module]) -> Iterator[Lookup]:
    """Every module that a server builds of those from `model_modules`, with the scheme it gets."""
    engine = replace(engine, fused={**FUSED, **server_facts(engine, facts).fused})
    for name, members in _built(engine, facts, modules).items():
        kind = members[0].kind
        scheme: ServedScheme | None = None
        refused: str | None = None
        try:
            if kind in (EXPERTS, MTP_EXPERTS):
                scheme = _find_experts(engine, facts, name, rules)
            elif is_looked_up(engine, facts, members[0]):
                scheme = _find(engine, name, class_of(kind, name), rules.ignore, rules.targets)
            if scheme is not None:
                _require_kernel(engine, scheme, kind, rules)
        except Refused as failure:
            scheme, refused = None, str(failure)
        yield Lookup(kind, name, members, scheme, refused)


def transformers_lookups(facts: Architecture, rules: Rules, modules: Iterable[Module]) -> Iterator[Lookup]:
    """The same for transformers."""
    experts: dict[str, list[Module]] = {}
    for module in modules:
        if module.kind == EXPERTS:
            assert module.layer is not None
            experts.setdefault(facts.layer(module.layer, facts.modules.experts), []).append(module)
        elif module.kind not in (MTP_LINEAR, MTP_EXPERTS, MTP_OTHER):
            yield Lookup(module.kind, module.name, [module], _transformers_scheme(module, rules))
    # Its one scheme for all experts is that of the first target of a kind.
    named = [scheme for target, scheme in rules.pairs if target.startswith("re:") and "experts" in target]
    classes = [scheme for target, scheme in rules.pairs if not target.startswith("re:")]
    chosen = next(iter([*named, *classes, *(scheme for _, scheme in rules.pairs)]), None)
    for name, members in experts.items():
        yield Lookup(EXPERTS, name, members, chosen)


def _transformers_scheme(module: Module, rules: Rules) -> ServedScheme | None:
    class_name = "Embedding" if module.kind == EMBEDDINGS else "Linear"
    # The class of a router is not nn.Linear, so it is never quantized.
    if module.kind == ROUTER or _first(module.name, rules.ignore) or class_name in rules.ignore:
        return None
    ordered = sorted(rules.targets, key=lambda target: ("re:" in target, target))
    chosen = _first(module.name, ordered) or (class_name if class_name in ordered else None)
    return rules.targets[chosen] if chosen else None


# How they choose ----------------------------------------------------------------------------------------------------


def _first(name: str, targets: Iterable[str]) -> str | None:
    from compressed_tensors.utils import match_name

    return next((target for target in targets if match_name(name, target)), None)


def _members(engine: Engine, name: str) -> tuple[str, ...]:
    """The names of the modules that a server fuses into the one of this name; none if it is no fused one."""
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{member}" for member in engine.fused.get(last, ()))


def _is_ignored(engine: Engine, name: str, ignore: Sequence[str]) -> bool:
    """Whether `ignore` covers a module; Refused if it covers only some members of a fused layer."""

    def covers(module: str) -> bool:
        by_suffix = engine.is_sglang and any(module.endswith(f".{entry}") for entry in ignore)
        return by_suffix or _first(module, ignore) is not None

    members = _members(engine, name)
    if not members:
        return covers(name)
    if name in ignore or (engine.own_names and covers(name)):
        return True
    covered = [covers(member) for member in members]
    if any(covered) and not all(covered):
        names = ", ".join(member.rpartition(".")[2] for member in members)
        raise Refused(f"`ignore` covers only some of {names}, which are fused into one layer")
    return all(covered)


def _find(
    engine: Engine, name: str, class_name: str, ignore: Sequence[str], targets: Mapping[str, ServedScheme]
) -> ServedScheme | None:
    """The scheme that a server gives a module, None if it is not quantized; Refused if the server stops here."""
    if _is_ignored(engine, name, ignore):
        return None
    by_name = _first(name, targets)
    # A target may occur anywhere in the class name, ignoring case: "Linear" in QKVParallelLinear.
    within = [target for target in targets if not target.startswith("re:") and target.lower() in class_name.lower()]
    by_class = next((target for target in targets if target in within or _first(class_name, [target])), None)
    matched = [_first(member, targets) for member in _members(engine, name)]
    by_members = matched[0] if matched and all(matched) else None
    order = (by_name, by_class, by_members) if engine.is_sglang else (by_name, by_members, by_class)
    chosen = next((target for target in order if target), None)
    if chosen is None and engine.is_sglang:
        raise Refused(f"no group matches {name.rpartition('.')[2]}")
    return targets[chosen] if chosen else None


def _find_experts(engine: Engine, facts: Architecture, prefix: str, rules: Rules) -> ServedScheme | None:
    """The scheme of a layer's experts: that of expert 0, below the module `prefix`, under the engine's names.

    Refused if its three matrices get different schemes.
    """
    targets, class_name = dict(rules.targets), "FusedMoE" if engine.is_sglang else "RoutedExperts"
    if "Linear" in targets:  # experts consist of linear layers, so this target covers them too
        targets.setdefault(class_name, targets["Linear"])
    names = engine.expert_names(facts)
    schemes = [_find(engine, f"{prefix}.0.{name}", class_name, rules.ignore, targets) for name in names]
    if any(scheme != schemes[0] for scheme in schemes):
        answers = ", ".join(f"{name} {s or 'not quantized'}" for name, s in zip(names, schemes, strict=True))
        raise Refused(f"multiple schemes for the matrices of an expert: {answers}")
    return schemes[0]


def _require_kernel(engine: Engine, scheme: ServedScheme, kind: str, rules: Rules) -> None:
    """Refused if a server does not take the scheme that it matched; kernels.py has those for packed integers."""
    name, whole = f"{scheme} ({scheme.origin})", f"the format of the whole checkpoint is {rules.format}"
    packed = scheme.type == "int" and scheme.strategy in ("group", "channel") and not scheme.activations
    fp8 = scheme.type == "float" and scheme.bits == 8 and scheme.strategy in ("block", "channel", "tensor")
    routed = engine.is_sglang and kind in (EXPERTS, MTP_EXPERTS)
    faults = (
        (scheme.dynamic, f"dynamically quantized weights ({scheme.origin}) are not supported"),
        (
            kind == EMBEDDINGS and (scheme.type != "int" or scheme.activations),
            f"an embedding as {name} is not supported",
        ),
        (packed and scheme.format != PACKED, f"{name} in format {scheme.format}: {PACKED} is needed"),
        (packed and routed and rules.format != PACKED, f"{whole}; for integer experts it must be {PACKED}"),
        (fp8 and not scheme.symmetric, f"{name} must be symmetric"),
        (
            fp8 and scheme.format not in ACTIVATION_FORMATS,
            f"{name} in format {scheme.format}: float-quantized is needed",
        ),
    )
    for is_so, why in faults:
        if is_so:
            raise Refused(why)
