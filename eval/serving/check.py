"""The serving check: how each engine would read a checkpoint, from its config.json and headers.

engines.py says which scheme an engine gives a module, schemes.py how the module is stored; here the two are compared,
and the shapes are checked that tensor parallelism leaves on each rank. Most of these mistakes cause no error when the
checkpoint is loaded, or an error that points elsewhere.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.architectures.matrices import MATRICES, PROJECTIONS
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.checkpoint.safetensors_header import Stored
from quantizers.planning.serving_memory import obstacles, unsaid
from quantizers.system.errors import InputError
from quantizers.system.formatting import places, text_table

from .engines import (
    EXPERTS,
    KINDS,
    MTP_EXPERTS,
    SERVERS,
    TRANSFORMERS,
    UNKNOWN_SERVER,
    VLLM,
    Lookup,
    Module,
    model_modules,
    module_of,
    server_lookups,
    transformers_lookups,
)
from .schemes import (
    SECTION,
    Mistake,
    Parts,
    Refused,
    Rules,
    ServedScheme,
    by_module,
    describe,
    mistakes,
    read_rules,
    validation_errors,
)

Severity = Literal["error", "warning"]
STORED = "stored as"
NONE = "-"  # for a kind of module that the model lacks
SERVER_NAMES = tuple(engine.name for engine in SERVERS)
ENGINES = (*SERVER_NAMES, TRANSFORMERS)
PARALLEL = (1, 2, 4, 8)
MARLIN_GROUPS, MARLIN_HIDDEN = (32, 64, 128), 128  # vLLM's check_moe_marlin_supports_config
KEYS = {
    "quant_method", "quantization_status", "format", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "sparsity_config", "transform_config", "version",
}  # fmt: skip
NOT_CHECKED = "nothing is known here of the servers of this model type, so none was checked"
MAY_SERVE = "it may serve this or not: vLLM's Transformers backend takes many types that vLLM has no model for"
UNINITIALIZED = "loading fails, or the parameter stays uninitialized"
REFUSES = "refuses it before loading a tensor"
GARBAGE = "loads without an error and produces garbage"
CONSEQUENCES: dict[Mistake, str] = {
    "no weight": UNINITIALIZED,
    "scale not renamed": "vLLM fails, for it has no such parameter; the others load the numbers unscaled: garbage",
    "no scale": f"loading fails, or {GARBAGE}: the scale keeps its initial value, zeros or NaN",
    "not quantized": f"loading fails on a missing parameter (vLLM), or {GARBAGE}",
    "not plain": f"loading fails on a missing parameter, or {GARBAGE}: the scheme's parameters are never set",
    "another scheme": f"loading fails: the parameters have other names or shapes; or {GARBAGE}",
    "extra": "vLLM fails with an AttributeError, for it has no such parameter; silently ignored by the others",
    "scale dtype": "the scale is silently rounded on load, and the integers no longer fit it",
}


# Findings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A mistake; an `error` if an engine refuses the checkpoint, or computes with other weights than those stored.

    `engine` names all affected engines, and `places` the tensors, modules or keys of config.json that have it.
    """

    severity: Severity
    engine: str
    problem: str
    consequence: str
    places: tuple[str, ...]

    @property
    def where(self) -> str:
        """The first of the places."""
        return self.places[0]

    def __str__(self) -> str:
        times = f" ({len(self.places):,} times)" if len(self.places) > 1 else ""
        return f"{self.severity}: {places(self.places)}{times}: {self.problem}; {self.engine}: {self.consequence}"

    def as_dict(self) -> dict[str, Any]:
        """For report.json: without the places, which may be as many as the model's tensors."""
        return {key: value for key, value in vars(self).items() if key != "places"} | {
            "where": self.where,
            "count": len(self.places),
        }


@dataclass(frozen=True)
class ServingCheck:
    """The result of `check`; `consumers` in report.json.

    Attributes:
        schemes: text by engine and kind of module; the row STORED is how the tensors are stored.
        findings: errors first.
        tensor_parallel: by number of ranks, `ok` or the reason why vLLM cannot split the model among them.
    """

    schemes: dict[str, dict[str, str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    tensor_parallel: dict[int, str] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        """The findings that make `quantize verify` fail."""
        return [finding for finding in self.findings if finding.severity == "error"]

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "schemes": self.schemes,
            "findings": [finding.as_dict() for finding in self.findings],
            "tensor_parallel": {str(ranks): text for ranks, text in self.tensor_parallel.items()},
        }


class _Findings:
    """Collects findings: gathers the places of equal ones, and joins engines with the same consequence."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Severity, str, str, str], list[str]] = {}

    def add(self, severity: Severity, engines: Iterable[str], where: str, problem: str, consequence: str) -> None:
        """Add a mistake for several engines."""
        for engine in engines:
            self._seen.setdefault((severity, engine, problem, consequence), []).append(where)

    def all(self) -> list[Finding]:
        """Each finding once, errors first."""
        joined: dict[tuple[Severity, str, str, tuple[str, ...]], list[str]] = {}
        for (severity, engine, problem, consequence), where in self._seen.items():
            joined.setdefault((severity, problem, consequence, tuple(where)), []).append(engine)
        return sorted(
            (Finding(key[0], ", ".join(engines), *key[1:]) for key, engines in joined.items()),
            key=lambda finding: finding.severity != "error",
        )


def render(result: ServingCheck) -> str:
    """Plain text: a table of schemes, the findings, and a table of tensor parallelism."""
    shown = [kind for kind in KINDS if any(kinds[kind] != NONE for kinds in result.schemes.values())]
    rows = [(engine, *(kinds[kind] for kind in shown)) for engine, kinds in result.schemes.items()]
    lines = [text_table(("", *shown), rows), ""]
    lines += [str(finding) for finding in result.findings] or ["every engine reads it as it is stored"]
    if result.tensor_parallel:
        lines += ["", text_table(("tensor parallel", "vLLM"), list(result.tensor_parallel.items()))]
    return "\n".join(lines)


# The check ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, own: Own = None) -> ServingCheck | None:
    """`check` of a checkpoint folder; None if it cannot be opened, which the audit reports.

    Args:
        own: its architecture, or a file of the user's with it; None for a kept one.
    """
    try:
        candidate = open_folder(folder, strays=True)
        facts = architecture_for(candidate.config, str(folder / CONFIG), own)
        sizes = sizes_of(facts)
    except InputError:
        return None
    return check(candidate.config, candidate.tensors, facts, sizes)


def check(config: Mapping[str, Any], tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes) -> ServingCheck:
    """Apply the engines' rules to a checkpoint.

    Args:
        config: config.json.
        tensors: every tensor's dtype (safetensors' spelling) and shape, by name.
        facts, sizes: of its architecture.
    """
    findings = _Findings()
    sizes = _without_absent_mtp(tensors, facts, sizes)
    stored, modules = by_module(tensors), model_modules(facts, sizes)
    if not config.get("architectures"):
        problem = "missing; servers look the model's class up by it"
        findings.add("error", SERVER_NAMES, f"{CONFIG}: architectures", problem, "loading fails")
    _check_names(tensors, stored, modules, facts, sizes, findings)
    table = {STORED: _by_kind((m.kind, describe(stored[m.name], m.shape)) for m in modules if m.name in stored)}
    packed = any("weight_packed" in parts for parts in stored.values())
    rules = _read_section(config.get(SECTION), packed, facts.section_keys, findings)
    if rules is None:
        return ServingCheck(table, findings.all())
    lookups = {
        engine.name: list(server_lookups(engine, facts, sizes, rules, modules))
        for engine in SERVERS
        if engine.key in facts.servers
    }
    if not lookups:
        lookups[UNKNOWN_SERVER.name] = list(server_lookups(UNKNOWN_SERVER, facts, sizes, rules, modules))
        findings.add("warning", SERVER_NAMES, facts.model_type, NOT_CHECKED, MAY_SERVE)
    lookups[TRANSFORMERS] = list(transformers_lookups(facts, rules, modules))
    one_scheme = len({lookup.scheme for lookup in next(iter(lookups.values())) if lookup.kind == EXPERTS} - {None}) < 2
    if not one_scheme:
        problem = "the experts' schemes differ between layers"
        consequence = "it has one scheme for the experts of all layers, so loading fails; servers read each layer's own"
        findings.add("warning", [TRANSFORMERS], f"{SECTION}.config_groups", problem, consequence)
    for engine, answers in lookups.items():
        table[engine] = _by_kind((lookup.kind, lookup.answer) for lookup in answers)
        for lookup in answers:
            if one_scheme or engine != TRANSFORMERS or lookup.kind != EXPERTS:
                _compare(engine, lookup, stored, findings)
    answers = lookups.get(VLLM.name, [])
    parallel = {ranks: tensor_parallel(ranks, facts, sizes, answers) for ranks in PARALLEL if answers}
    return ServingCheck(table, findings.all(), parallel)


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


def _compare(engine: str, lookup: Lookup, stored: Mapping[str, Parts], findings: _Findings) -> None:
    """Compare an engine's scheme for a module with the tensors that it will load into it."""
    if lookup.refused is not None:
        findings.add("error", [engine], lookup.asked, f"{lookup.kind}: {lookup.refused}", REFUSES)
        return
    for member in lookup.members:
        if member.name not in stored:
            continue  # reported by `_check_names`
        for mistake, problem in mistakes(lookup.scheme, stored[member.name], member.shape):
            severity: Severity = "warning" if mistake == "scale dtype" else "error"
            findings.add(severity, [engine], member.name, f"{lookup.kind}: {problem}", CONSEQUENCES[mistake])


def _check_names(
    tensors: Mapping[str, Stored],
    stored: Mapping[str, Parts],
    modules: Sequence[Module],
    facts: Architecture,
    sizes: Sizes,
    findings: _Findings,
) -> None:
    """Report experts under another family's names, and missing tensors."""
    misnamed = _misnamed_experts(stored, facts, sizes)
    own = "/".join(facts.expert_linears[matrix].name for matrix in MATRICES)
    names = "/".join(dict.fromkeys(misnamed.values()))
    for module in misnamed:
        problem = f"experts are stored as {names}; this family's names are {own}"
        findings.add("error", SERVER_NAMES, module, problem, f"{GARBAGE}: unknown names are silently ignored")
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
        tensors = facts.of_layer(layer).tensors
        named |= {facts.layer(layer, name): tensor for name, tensor in tensors.items()}
    return [name for name, tensor in named.items() if len(tensor.shape) == 1 and not tensor.optional]


def _misnamed_experts(stored: Mapping[str, Parts], facts: Architecture, sizes: Sizes) -> dict[str, str]:
    """Expert modules under other names than the family's: the last part of the name, by module."""
    right = {linear.name for linear in facts.expert_linears.values()}
    others = [name for name in (*PROJECTIONS.values(), "w1", "w3", "w2") if name not in right]
    prefixes = [
        facts.layer(layer, facts.expert_prefix.format(expert=expert))
        for layer in (*sizes.moe_layers, *sizes.mtp)
        for expert in range(sizes["experts"])
    ]
    return {prefix + other: other for prefix in prefixes for other in others if prefix + other in stored}


def _read_section(section: Any, packed: bool, extra: Iterable[str], findings: _Findings) -> Rules | None:
    """Parse quantization_config; None if there are no rules to apply. Mistakes in the section itself are added.

    Args:
        packed: the checkpoint has packed integers.
        extra: keys of the family that servers read for any method.
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
    for name in sorted(section.keys() - KEYS - set(extra)):
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


# Tensor parallelism ------------------------------------------------------------------------------------------------


def tensor_parallel(ranks: int, facts: Architecture, sizes: Sizes, lookups: Sequence[Lookup]) -> str:
    """`ok`, or the first reason why vLLM cannot split a checkpoint among tensor-parallel ranks, or why that is unknown.

    The rules for outputs of this program are in planning/serving_memory.py. Other checkpoints may also break those of
    the Marlin kernel, or have experts in FP8 blocks.

    Args:
        lookups: vLLM's.
    """
    if problem := unsaid(facts):
        return problem
    experts = {lookup.scheme for lookup in lookups if lookup.kind == EXPERTS and lookup.scheme}
    groups = {scheme.group_size for scheme in experts if scheme.type == "int" and scheme.group_size}
    linears = facts.every_linear()
    blocks = {
        name: lookup.scheme.block
        for lookup in lookups
        for member in lookup.members
        if (name := member.name.removeprefix(facts.layer(member.layer or 0, ""))) in linears
        if lookup.scheme and lookup.scheme.block
    }
    problems = obstacles(ranks, facts, sizes, groups, blocks)
    return next(chain(problems, _expert_obstacles(ranks, sizes, groups, experts)), "ok")


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
