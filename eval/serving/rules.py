"""Which scheme a serving engine gives a module: the engines' matching rules, as functions of names.

A `target` of a config group is `re:` and a regular expression (matched from the start), a module's name, or
the name of a class such as "Linear". The engines differ in the names that they look up and in the order in
which they try the kinds of target:

    vLLM          name, then the parts of a fused layer, then the class; no match: not quantized
    SGLang        name, class, parts; no match: an error. Head and embedding are never looked up
    transformers  name, then class; q, k and v separately; for experts the first group with a `re:` target
                  that contains "experts", even if that expression does not match them

Both servers look up expert 0 only, and its three matrices must get the same scheme. vLLM calls them as the family's
files do since 0.32 (w1/w3/w2 where these do), and gate_proj/up_proj/down_proj before; SGLang always uses the latter
names. Below which module they lie is a fact of the family's, for each server, and so are the linear modules that it
fuses besides q, k and v, and gate and up. Taken from the sources of vLLM 0.15 to 0.33 (before about 0.23 it tried the
class before the parts), SGLang 0.5.23 and transformers 5.17; eval/serving/vllm.py asks an installed vLLM.

A layer that predicts further tokens (MTP) is looked up by a server for speculative decoding alone: by vLLM under its
number, by SGLang under a prefix of its own. transformers never builds one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import ServerName
from quantizers.architectures.fused import FUSED
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes

from .config_groups import Refused, Rules, ServedScheme

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
    "MTP other",  # its router, and what such a layer has besides
)
# Formats under which servers assume that a scheme quantizes activations too, FP8 among them.
ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
PACKED = "pack-quantized"


@dataclass(frozen=True)
class Engine:
    """A server: which names it looks up, and how it matches them.

    Attributes:
        key: of the server in a family's facts.
        name: with the versions it stands for.
        expert_class: the class that holds a layer's experts.
        own_names: whether it looks up experts' matrices by the family's names (w1/w3/w2), or else by PROJECTIONS.
        plain_kinds: the kinds outside the layers that it builds without consulting the rules.
        class_before_parts: it tries the class before the parts of a fused layer.
        unmatched_is_error: it stops if nothing matches; otherwise such a module is not quantized.
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
        """The same server with what it fuses in this family."""
        return replace(self, fused={**FUSED, **facts.servers[self.key].fused})

    def layer_prefix(self, facts: Architecture, sizes: Sizes, layer: int) -> str:
        """Its prefix for the modules of a layer."""
        own = facts.servers[self.key].mtp_prefix
        return own if layer in sizes.mtp and own is not None else facts.layer(layer, "")

    def expert_parts(self, facts: Architecture) -> tuple[str, ...]:
        """The names under which it looks up gate, up and down."""
        return tuple(facts.expert_linears[m].name for m in MATRICES) if self.own_names else tuple(PROJECTIONS.values())

    def expert_prefix(self, facts: Architecture, sizes: Sizes, layer: int) -> str:
        """Its name for the module that holds a layer's experts."""
        return self.layer_prefix(facts, sizes, layer) + facts.servers[self.key].experts


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


def matches(name: str, target: str) -> bool:
    """Whether a target is this name, or an expression that matches it from the start."""
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def first(name: str, targets: Iterable[str]) -> str | None:
    """The first target that matches a name."""
    return next((target for target in targets if matches(name, target)), None)


def _first_class(name: str, targets: Iterable[str]) -> str | None:
    # The servers accept a target that occurs anywhere in the class name, ignoring case: "Linear" in QKVParallelLinear.
    for target in targets:
        if matches(name, target) if target.startswith("re:") else target.lower() in name.lower():
            return target
    return None


def _parts(engine: Engine, name: str) -> tuple[str, ...]:
    parent, _, last = name.rpartition(".")
    return tuple(f"{parent}.{part}" for part in engine.fused.get(last, ()))


def _first_of_parts(engine: Engine, name: str, targets: Iterable[str]) -> str | None:
    matched = [first(part, targets) for part in _parts(engine, name)]
    return matched[0] if matched and all(matched) else None


def is_ignored(engine: Engine, name: str, ignore: Sequence[str]) -> bool:
    """Whether `ignore` covers a module.

    Raises:
        Refused: it covers only some of a fused layer's parts.
    """

    def covers(module: str) -> bool:
        return any(
            matches(module, entry) or (engine.ignores_by_suffix and module.endswith(f".{entry}")) for entry in ignore
        )

    parts = _parts(engine, name)
    if not parts:
        return covers(name)
    if name in ignore or (engine.ignores_fused_name and covers(name)):
        return True
    covered = [covers(part) for part in parts]
    if any(covered) and not all(covered):
        names = ", ".join(part.rpartition(".")[2] for part in parts)
        raise Refused(f"`ignore` covers only some of {names}, which are one layer")
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
    by_parts = _first_of_parts(engine, name, targets)
    order = (by_name, by_class, by_parts) if engine.class_before_parts else (by_name, by_parts, by_class)
    chosen = next((target for target in order if target), None)
    if chosen is None and engine.unmatched_is_error:
        raise Refused(f"no group matches {name.rpartition('.')[2]}")
    return targets[chosen] if chosen else None


def find_experts(engine: Engine, facts: Architecture, prefix: str, rules: Rules) -> ServedScheme | None:
    """The scheme of a layer's experts: that of expert 0, looked up under the engine's own names.

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


def require_kernel(engine: Engine, scheme: ServedScheme | None, kind: str, rules: Rules) -> None:
    """Check that a server has a kernel for the scheme it matched.

    Raises:
        Refused: it has none.
    """
    if scheme is None:
        return
    if scheme.dynamic:
        raise Refused(f"weights that are quantized dynamically ({scheme.origin}) are not supported")
    if kind == EMBEDDINGS and (scheme.type != "int" or scheme.activations):
        raise Refused(f"an embedding as {scheme} ({scheme.origin}) is not supported")
    if scheme.type == "int" and scheme.strategy in ("group", "channel") and not scheme.activations:
        if scheme.format != PACKED or scheme.bits not in (4, 8):
            raise Refused(f"{scheme} ({scheme.origin}) in format {scheme.format}: only {PACKED}, 4 or 8 bits, is taken")
        if engine.packed_only and kind in (EXPERTS, MTP_EXPERTS) and rules.format != PACKED:
            raise Refused(
                f"the format of the whole checkpoint is {rules.format}; for integer experts it must be {PACKED}"
            )
    if scheme.type == "float" and scheme.bits == 8 and scheme.strategy in ("block", "channel", "tensor"):
        if not scheme.symmetric:
            raise Refused(f"{scheme} ({scheme.origin}) must be symmetric")
        if scheme.format not in ACTIVATION_FORMATS:
            raise Refused(f"{scheme} ({scheme.origin}) in format {scheme.format}: float-quantized is needed")
