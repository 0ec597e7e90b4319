"""The serving check: how each engine would read a checkpoint, from its config.json and headers.

engines.py and lookup.py say which scheme an engine gives a module, stored.py how the module is stored; here the two are
compared, and the shapes are checked that tensor parallelism leaves on each rank. Most of these mistakes cause no error
when the checkpoint is loaded, or an error that points elsewhere.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.checkpoint.safetensors_header import Stored
from quantizers.planning.serving_memory import obstacles, unsaid
from quantizers.system.errors import InputError

from .config import SECTION, Refused, Rules, ServedScheme, read_rules, validation_errors
from .engines import EXPERTS, KINDS, MTP_EXPERTS, SERVERS, VLLM
from .findings import NONE, Consumers, Findings, Severity
from .lookup import (
    TRANSFORMERS,
    Lookup,
    Module,
    model_modules,
    module_of,
    names_experts,
    server_lookups,
    transformers_lookups,
)
from .stored import Mistake, Parts, by_module, describe, mistakes

STORED = "stored as"
SERVER_NAMES = tuple(engine.name for engine in SERVERS)
ENGINES = (*SERVER_NAMES, TRANSFORMERS)
FAMILIES = ("vLLM", "SGLang", "transformers")
PARALLEL = (1, 2, 4, 8)
MARLIN_GROUPS, MARLIN_HIDDEN = (32, 64, 128), 128  # vLLM's check_moe_marlin_supports_config
KEYS = {
    "quant_method", "quantization_status", "format", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "sparsity_config", "transform_config", "version",
}  # fmt: skip
UNINITIALIZED = "loading fails, or the parameter stays uninitialized"
REFUSES = "refuses it before loading a tensor"
# The consequence of each mistake, by engine family (the first word of the engine's name).
CONSEQUENCES: dict[Mistake, dict[str, str]] = {
    "no weight": dict.fromkeys(FAMILIES, UNINITIALIZED),
    "scale not renamed": {
        "vLLM": "loading fails: there is no parameter weight_scale_inv",
        "SGLang": "loads without an error and produces garbage: the scale is silently ignored and never set",
        "transformers": "loads unscaled with only a warning: every weight is off by the scale of its block",
    },
    "no scale": {
        "vLLM": "loads without an error and keeps the scale's initial value: zeros in older releases, then NaN",
        "SGLang": "loads without an error and keeps the scale's initial value: garbage",
        "transformers": "weights cannot be paired with their scales: loading fails, or they are misscaled",
    },
    "not quantized": {
        "vLLM": "loading fails on a missing parameter: a plain layer has none for packed weights or scales",
        "SGLang": "loads without an error and produces garbage: names without a parameter are silently ignored",
        "transformers": "the packed or unscaled numbers are taken as weights, with only a warning",
    },
    "not plain": {
        "vLLM": "loading fails on a missing parameter, or plain weights are cast without a scale: garbage",
        "SGLang": "the parameters of the scheme are never set: garbage",
        "transformers": "the parameters of the scheme are never set, with only a warning",
    },
    "another scheme": {
        "vLLM": "loading fails: the parameters have other names or shapes than the tensors",
        "SGLang": "loading fails, or the parameters are never set: garbage",
        "transformers": "loading fails, or the parameters keep random numbers with only a warning",
    },
    "extra": {
        "vLLM": "loading fails with an AttributeError: there is no parameter for it",
        "SGLang": "silently ignored",
        "transformers": "ignored with a warning",
    },
    "scale dtype": dict.fromkeys(FAMILIES, "the scale is silently rounded on load, and the integers no longer fit it"),
}
ABSORBED = "kv_b_proj"  # of MLA: servers unpack it once and absorb it into other matrices


def check_folder(folder: Path, own: Path | None = None) -> Consumers | None:
    """`check` of a checkpoint folder; None if it cannot be opened, which the audit reports.

    Args:
        own: a user-supplied architecture file.
    """
    try:
        candidate = open_folder(folder)
        facts = architecture_for(candidate.config, str(folder / CONFIG), own)
        sizes = sizes_of(facts, candidate.config, str(folder / CONFIG))
    except InputError:
        return None
    return check(candidate.config, candidate.tensors, facts, sizes)


def check(config: Mapping[str, Any], tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes) -> Consumers:
    """Apply the engines' rules to a checkpoint.

    Args:
        config: config.json.
        tensors: every tensor's dtype (safetensors' spelling) and shape, by name.
        facts, sizes: of its architecture.
    """
    findings = Findings()
    sizes = _without_absent_mtp(tensors, facts, sizes)
    stored, modules = by_module(tensors), model_modules(facts, sizes)
    _check_names(tensors, stored, modules, facts, sizes, findings)
    table = {STORED: _by_kind((m.kind, describe(stored[m.name], m.shape)) for m in modules if m.name in stored)}
    packed = any("weight_packed" in parts for parts in stored.values())
    rules = _read_section(config.get(SECTION), packed, facts.targets.keys, findings)
    if rules is None:
        return Consumers(table, findings.all())
    lookups = {
        engine.name: list(server_lookups(engine, facts, sizes, rules, modules))
        for engine in SERVERS
        if engine.key in facts.servers
    }
    if not lookups:
        problem = "no supported release of vLLM or SGLang has a model for this family"
        findings.add("warning", SERVER_NAMES, facts.model_type, problem, "this checkpoint cannot be served by it")
    lookups[TRANSFORMERS] = list(transformers_lookups(facts, rules, modules))
    one_scheme = _check_groups(rules, next(iter(lookups.values())), lookups[TRANSFORMERS], findings)
    for engine, answers in lookups.items():
        table[engine] = _by_kind((lookup.kind, lookup.answer) for lookup in answers)
        for lookup in answers:
            if one_scheme or engine != TRANSFORMERS or lookup.kind != EXPERTS:
                _compare(engine, lookup, stored, findings)
    parallel = {}
    if VLLM.name in lookups:
        _note_unverified(lookups, findings)
        parallel = {ranks: tensor_parallel(ranks, facts, sizes, lookups[VLLM.name]) for ranks in PARALLEL}
    return Consumers(table, findings.all(), parallel)


def _without_absent_mtp(tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes) -> Sizes:
    """The sizes without MTP layers, if config.json declares some but no file has any: most tools leave them out."""
    prefixes = tuple(facts.layer(layer, "") for layer in sizes.mtp)
    present = copy.copy(sizes)
    if not any(name.startswith(prefixes) for name in tensors):
        present.mtp = range(0)
    return present


def _by_kind(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One text per kind of module; if its members differ, all their texts with counts."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, text in pairs:
        counts[kind][text] += 1
    return {
        kind: next(iter(texts))
        if len(texts) == 1
        else ", ".join(f"{text} ({n:,})" for text, n in texts.items()) or NONE
        for kind, texts in counts.items()
    }


def _compare(engine: str, lookup: Lookup, stored: Mapping[str, Parts], findings: Findings) -> None:
    """Compare an engine's scheme for a module with the tensors that it will load into it."""
    if lookup.refused is not None:
        findings.add("error", [engine], lookup.asked, f"{lookup.kind}: {lookup.refused}", REFUSES)
        return
    family = engine.split(maxsplit=1)[0]
    for member in lookup.members:
        if member.name not in stored:
            continue  # reported by `_check_names`
        for mistake, problem in mistakes(lookup.scheme, stored[member.name], member.shape):
            severity: Severity = "warning" if mistake == "scale dtype" else "error"
            findings.add(severity, [engine], member.name, f"{lookup.kind}: {problem}", CONSEQUENCES[mistake][family])


def _check_groups(rules: Rules, asked: Sequence[Lookup], lookups: Sequence[Lookup], findings: Findings) -> bool:
    """Warn of config groups that transformers does not honour.

    Args:
        asked: a server's lookups.
        lookups: transformers'.

    Returns:
        False if the layers' experts have different schemes.
    """
    where = f"{SECTION}.config_groups"
    experts = {lookup.scheme for lookup in lookups if lookup.kind == EXPERTS}
    others = [
        targets for targets, scheme in rules.groups if scheme not in experts and not any(map(names_experts, targets))
    ]
    if len(others) > 1:
        problem = f"{len(others)} groups besides that of the experts"
        findings.add("warning", [TRANSFORMERS], where, problem, "at most one of them is honoured")
    if len({lookup.scheme for lookup in asked if lookup.kind == EXPERTS} - {None}) > 1:
        consequence = "it has one scheme for the experts of all layers, so loading fails; servers read each layer's own"
        findings.add("warning", [TRANSFORMERS], where, "the experts' schemes differ between layers", consequence)
        return False
    return True


def _note_unverified(lookups: Mapping[str, Iterable[Lookup]], findings: Findings) -> None:
    """Note a module that works according to vLLM's source, but has not been run."""
    for engine in SERVERS:
        for lookup in lookups[engine.name] if engine.key == VLLM.key else ():
            in_blocks = lookup.scheme is not None and lookup.scheme.type == "float" and lookup.scheme.block
            if in_blocks and lookup.asked.endswith(f".{ABSORBED}"):
                problem = f"{lookup.scheme} under compressed-tensors is unverified for {ABSORBED}"
                consequence = "its source unpacks it by a product with the identity matrix; not tested"
                findings.add("note", [engine.name], lookup.asked, problem, consequence)


def _check_names(
    tensors: Mapping[str, Stored],
    stored: Mapping[str, Parts],
    modules: Sequence[Module],
    facts: Architecture,
    sizes: Sizes,
    findings: Findings,
) -> None:
    """Report experts under another family's names, and missing tensors."""
    misnamed = _misnamed_experts(stored, facts, sizes)
    own = "/".join(facts.expert_linears[matrix].name for matrix in MATRICES)
    names = "/".join(dict.fromkeys(misnamed.values()))
    garbage = "loads without an error and produces garbage: unknown names are silently ignored, the experts never set"
    for module in misnamed:
        problem = f"experts are stored as {names}; this family's names are {own}"
        findings.add("error", SERVER_NAMES, module, problem, garbage)
        findings.add("error", [TRANSFORMERS], module, problem, "the experts keep random numbers, with only a warning")
    reported = (EXPERTS, MTP_EXPERTS) if misnamed else ()
    missing = [m.name for m in modules if m.name not in stored and not m.optional and m.kind not in reported]
    for name in (*missing, *(name for name in _vectors(facts, sizes) if name not in tensors)):
        problem = f"{module_of(name).rpartition('.')[2]} is missing"
        findings.add("error", ENGINES, name, problem, UNINITIALIZED)


def _vectors(facts: Architecture, sizes: Sizes) -> list[str]:
    """The required tensors that are not matrices: norms, biases and the router's correction bias."""
    named = dict(facts.outside)
    for layer in (*range(sizes["layers"]), *sizes.mtp):
        own = facts.mtp_tensors() if layer in sizes.mtp else facts.tensors(layer in sizes.dense)
        named |= {facts.layer(layer, name): tensor for name, tensor in own.items()}
    return [name for name, tensor in named.items() if len(tensor.shape) == 1 and not tensor.optional]


def _misnamed_experts(stored: Mapping[str, Parts], facts: Architecture, sizes: Sizes) -> dict[str, str]:
    """Expert modules under other names than the family's: the last part of the name, by module."""
    own = {linear.name for linear in facts.expert_linears.values()}
    others = [name for name in (*PROJECTIONS.values(), "w1", "w3", "w2") if name not in own]
    prefixes = [
        facts.layer(layer, facts.expert_prefix.format(expert=expert))
        for layer in (*sizes.moe_layers, *sizes.mtp)
        for expert in range(sizes["experts"])
    ]
    return {prefix + other: other for prefix in prefixes for other in others if prefix + other in stored}


def _read_section(section: Any, packed: bool, own: Iterable[str], findings: Findings) -> Rules | None:
    """Parse quantization_config; None if there are no rules to apply. Mistakes in the section itself are added.

    Args:
        packed: the checkpoint has packed integers.
        own: keys of the family that servers read for any method.
    """
    if not isinstance(section, Mapping):
        if packed:
            problem = "missing, though there are packed integers"
            findings.add("error", ENGINES, SECTION, problem, "loading fails: they are taken as not quantized")
        return None
    if section.get("quant_method") != "compressed-tensors":
        problem = f"is {section.get('quant_method')!r}, not 'compressed-tensors'; its rules are not checked here"
        consequence = "loading fails: packed integers are not understood" if packed else "other rules apply"
        findings.add("error" if packed else "warning", ENGINES, f"{SECTION}.quant_method", problem, consequence)
        return None
    for name in sorted(section.keys() - KEYS - set(own)):
        problem = "not a key of compressed-tensors; the source's own section must be replaced as a whole"
        findings.add("warning", ENGINES, f"{SECTION}.{name}", problem, "ignored or misread")
    errors = validation_errors(section)
    for where, problem in errors:
        # vLLM and SGLang validate the quantization arguments within a group, but not the keys around them.
        engines = ENGINES if {"weights", "input_activations"} & set(where.split(".")) else (TRANSFORMERS,)
        findings.add("error", engines, where, problem, "validation error before a tensor is loaded")
    try:
        return read_rules(section)
    except Refused as refused:
        if not any("weights" in where for where, _ in errors):
            findings.add("error", ENGINES, SECTION, str(refused), REFUSES)
        return None


def tensor_parallel(ranks: int, facts: Architecture, sizes: Sizes, lookups: Sequence[Lookup]) -> str:
    """`ok`, or the first reason why vLLM cannot split a checkpoint among tensor-parallel ranks, or why that is unknown.

    The rules for outputs of this program are in planning/tensor_parallel.py. Other checkpoints may also break
    those of the Marlin kernel, or have experts in FP8 blocks.

    Args:
        lookups: vLLM's.
    """
    if problem := unsaid(facts):
        return problem
    experts = {lookup.scheme for lookup in lookups if lookup.kind == EXPERTS and lookup.scheme}
    groups = {scheme.group_size for scheme in experts if scheme.type == "int" and scheme.group_size}
    problems = obstacles(ranks, facts, sizes, groups, _blocks(facts, sizes, lookups))
    return next(chain(problems, _expert_obstacles(ranks, sizes, groups, experts)), "ok")


def _blocks(facts: Architecture, sizes: Sizes, lookups: Iterable[Lookup]) -> dict[str, tuple[int, int]]:
    """The FP8 blocks of linear modules, by their names without the layer's prefix."""
    linears = facts.linears(dense=False) | (facts.linears(dense=True) if sizes.dense else {})
    blocks: dict[str, tuple[int, int]] = {}
    for lookup in lookups:
        for member in lookup.members if lookup.scheme is not None and lookup.scheme.block else ():
            name = member.name.removeprefix(facts.layer(member.layer or 0, ""))
            if name in linears and lookup.scheme is not None and lookup.scheme.block:
                blocks[name] = lookup.scheme.block
    return blocks


def _expert_obstacles(
    ranks: int, sizes: Sizes, groups: Iterable[int], schemes: Iterable[ServedScheme]
) -> Iterator[str]:
    hidden, share = sizes["hidden"], sizes["width"] // ranks
    if ranks > sizes["experts"]:
        yield f"there are only {sizes['experts']} experts"
    for group in groups:
        if hidden % group:
            yield f"hidden size {hidden} is not a multiple of the group, {group}"
        if group not in MARLIN_GROUPS:
            yield f"Marlin supports groups of {', '.join(map(str, MARLIN_GROUPS))}, not {group}"
        if hidden % MARLIN_HIDDEN:
            yield f"hidden size {hidden} is not a multiple of {MARLIN_HIDDEN}, which Marlin needs"
    for scheme in schemes:
        if scheme.type != "int" and scheme.block and share % scheme.block[0]:
            yield f"the experts' width per rank, {share}, is not a multiple of the FP8 block, {scheme.block[0]}"
