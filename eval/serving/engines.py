"""Which scheme a server gives a module: the matching rules of vLLM and SGLang.

A target of a config group is `re:` and a regular expression (matched from the start), a module's name, or a class name
such as "Linear". The servers differ in the names that they look up, and in the order in which they try targets:

    vLLM     name, then the parts of a fused layer, then the class; no match: not quantized
    SGLang   name, class, parts; no match: an error. Head and embedding are never looked up

Both look up expert 0 only, and its three matrices must get the same scheme. vLLM uses the family's published names for
them since 0.32 (w1/w3/w2 in MiniMax-M2), before that gate_proj/up_proj/down_proj, as SGLang does. The module that holds
the experts, and modules that are fused besides q, k, v and gate, up, are in the family's facts. MTP layers are looked
up for speculative decoding only: by vLLM under their number, by SGLang under a separate prefix.

From the sources of vLLM 0.15 to 0.33 (before about 0.23 it tried the class before the parts) and SGLang 0.5.23;
ask_vllm.py compares these rules with an installed vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import ServerName
from quantizers.architectures.fused import FUSED
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes

from .config import Refused, Rules, ServedScheme

ATTENTION, OUTPUT, MLP, SHARED, EXPERTS, ROUTER, HEAD, EMBEDDINGS, MTP_LINEAR, MTP_EXPERTS, MTP_OTHER = KINDS = (
    "attention q,k,v",
    "attention o",
    "dense MLP",
    "shared experts",
    "experts",
    "router",
    "lm_head",
    "embeddings",
    "MTP linear",
    "MTP experts",
    "MTP other",  # its router, and the modules that only such a layer has
)
# Formats under which servers assume that a scheme also quantizes activations, FP8 among them.
ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
PACKED = "pack-quantized"


@dataclass(frozen=True)
class Engine:
    """A server: the names that it looks up, and how it matches them.

    Attributes:
        key: of the server in a family's facts.
        name: with the versions it stands for.
        expert_class: the class that holds a layer's experts.
        own_names: it looks up experts' matrices by the family's names (w1/w3/w2), otherwise by PROJECTIONS.
        plain_kinds: kinds outside the layers that it builds without consulting the config.
        class_before_parts: it tries the class before the parts of a fused layer.
        unmatched_is_error: it refuses a module that nothing matches; otherwise that is not quantized.
        ignores_fused_name: an expression in `ignore` is also tried on the fused layer's own name.
        ignores_by_suffix: an entry of `ignore` also covers names that end with it.
        packed_only: integer experts need `pack-quantized` as the format of the whole checkpoint.
        fused: the parts of each linear module that it builds as one, by the last part of their names.
    """

    key: ServerName
    name: str
    expert_class: str
    own_names: bool
    plain_kinds: tuple[str, ...] = ()
    class_before_parts: bool = False
    unmatched_is_error: bool = False
    ignores_fused_name: bool = False
    ignores_by_suffix: bool = False
    packed_only: bool = False
    fused: Mapping[str, Sequence[str]] = field(default_factory=lambda: FUSED, hash=False)

    def of_family(self, facts: Architecture) -> Engine:
        """The server with the modules that it fuses in this family."""
        return replace(self, fused={**FUSED, **facts.servers[self.key].fused})

    def layer_prefix(self, facts: Architecture, sizes: Sizes, layer: int) -> str:
        """Its prefix for the modules of a layer."""
        own = facts.servers[self.key].mtp_prefix
        return own if layer in sizes.mtp and own is not None else facts.layer(layer, "")

    def expert_parts(self, facts: Architecture) -> tuple[str, ...]:
        """The names under which it looks up gate, up and down."""
        return tuple(facts.expert_linears[m].name for m in MATRICES) if self.own_names else tuple(PROJECTIONS.values())


VLLM = Engine("vllm", "vLLM 0.32+", "RoutedExperts", own_names=True, ignores_fused_name=True)
VLLM_BEFORE = Engine("vllm", "vLLM 0.14-0.31", "RoutedExperts", own_names=False)
SGLANG = Engine(
    "sglang",
    "SGLang",
    "FusedMoE",
    own_names=False,
    plain_kinds=(HEAD, EMBEDDINGS),
    class_before_parts=True,
    unmatched_is_error=True,
    ignores_by_suffix=True,
    packed_only=True,
)
SERVERS = (VLLM, VLLM_BEFORE, SGLANG)


def first(name: str, targets: Iterable[str]) -> str | None:
    """The first target that matches a name."""
    from compressed_tensors.utils import match_name

    return next((target for target in targets if match_name(name, target)), None)


def _first_class(name: str, targets: Iterable[str]) -> str | None:
    # The servers accept a target that occurs anywhere in the class name, ignoring case: "Linear" in QKVParallelLinear.
    found = (t for t in targets if first(name, [t]) or (not t.startswith("re:") and t.lower() in name.lower()))
    return next(found, None)


def _parts(engine: Engine, name: str) -> tuple[str, ...]:
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{part}" for part in engine.fused.get(last, ()))


def is_ignored(engine: Engine, name: str, ignore: Sequence[str]) -> bool:
    """Whether `ignore` covers a module.

    Raises:
        Refused: it covers only some parts of a fused layer.
    """

    def covers(module: str) -> bool:
        by_suffix = engine.ignores_by_suffix and any(module.endswith(f".{entry}") for entry in ignore)
        return by_suffix or first(module, ignore) is not None

    parts = _parts(engine, name)
    if not parts:
        return covers(name)
    if name in ignore or (engine.ignores_fused_name and covers(name)):
        return True
    covered = [covers(part) for part in parts]
    if any(covered) and not all(covered):
        names = ", ".join(part.rpartition(".")[2] for part in parts)
        raise Refused(f"`ignore` covers only some of {names}, which are fused into one layer")
    return all(covered)


def find(
    engine: Engine, name: str, class_name: str, rules: Rules, targets: Mapping[str, ServedScheme]
) -> ServedScheme | None:
    """The scheme that a server gives a module; None if it is not quantized.

    Raises:
        Refused: the server stops here.
    """
    if is_ignored(engine, name, rules.ignore):
        return None
    by_name, by_class = first(name, targets), _first_class(class_name, targets)
    matched = [first(part, targets) for part in _parts(engine, name)]
    by_parts = matched[0] if matched and all(matched) else None
    order = (by_name, by_class, by_parts) if engine.class_before_parts else (by_name, by_parts, by_class)
    chosen = next((target for target in order if target), None)
    if chosen is None and engine.unmatched_is_error:
        raise Refused(f"no group matches {name.rpartition('.')[2]}")
    return targets[chosen] if chosen else None


def find_experts(engine: Engine, facts: Architecture, prefix: str, rules: Rules) -> ServedScheme | None:
    """The scheme of a layer's experts: that of expert 0, under the engine's names.

    Args:
        prefix: the engine's name for the module that holds them.

    Raises:
        Refused: its three matrices get different schemes, or the server stops earlier.
    """
    targets = dict(rules.targets)
    if "Linear" in targets:  # experts consist of linear layers, so this target covers them too
        targets.setdefault(engine.expert_class, targets["Linear"])
    parts = engine.expert_parts(facts)
    schemes = [find(engine, f"{prefix}.0.{part}", engine.expert_class, rules, targets) for part in parts]
    if any(scheme != schemes[0] for scheme in schemes):
        answers = ", ".join(f"{part} {s or 'not quantized'}" for part, s in zip(parts, schemes, strict=True))
        raise Refused(f"multiple schemes for the matrices of an expert: {answers}")
    return schemes[0]


def require_kernel(engine: Engine, scheme: ServedScheme, kind: str, rules: Rules) -> None:
    """Check that a server has a kernel for the scheme that it matched.

    Raises:
        Refused: it has none.
    """
    name = f"{scheme} ({scheme.origin})"
    if scheme.dynamic:
        raise Refused(f"dynamically quantized weights ({scheme.origin}) are not supported")
    if kind == EMBEDDINGS and (scheme.type != "int" or scheme.activations):
        raise Refused(f"an embedding as {name} is not supported")
    if scheme.type == "int" and scheme.strategy in ("group", "channel") and not scheme.activations:
        if scheme.format != PACKED or scheme.bits not in (4, 8):
            raise Refused(f"{name} in format {scheme.format}: only {PACKED} with 4 or 8 bits is supported")
        if engine.packed_only and kind in (EXPERTS, MTP_EXPERTS) and rules.format != PACKED:
            raise Refused(
                f"the format of the whole checkpoint is {rules.format}; for integer experts it must be {PACKED}"
            )
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy in ("block", "channel", "tensor"):
        if not scheme.symmetric:
            raise Refused(f"{name} must be symmetric")
        if scheme.format not in ACTIVATION_FORMATS:
            raise Refused(f"{name} in format {scheme.format}: float-quantized is needed")
