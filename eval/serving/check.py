"""How each serving engine would read a checkpoint, from its config.json and headers alone.

rules.py and readings.py say which scheme an engine gives a module, tensors.py how the module is stored; this
module compares the two, and checks the shapes that tensor parallelism leaves on each rank. Most of these
mistakes cause no error when the checkpoint is loaded, or an error that points elsewhere.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import Stored

from .config_groups import Refused, Rules, read_rules
from .findings import NONE, Consumers, Findings, Severity
from .parallel import tensor_parallel
from .readings import TRANSFORMERS, Reading, module_of, names_experts, server_readings, transformers_readings
from .rules import EXPERTS, KINDS, MTP_EXPERTS, SERVERS, VLLM
from .tensors import (
    Mistake,
    Module,
    Parts,
    by_module,
    describe,
    expected_modules,
    expected_vectors,
    misnamed_experts,
    mistakes,
)

STORED = "stored as"
SECTION = "quantization_config"
SERVER_NAMES = tuple(engine.name for engine in SERVERS)
ENGINES = (*SERVER_NAMES, TRANSFORMERS)
FAMILIES = ("vLLM", "SGLang", "transformers")
PARALLEL = (1, 2, 4, 8)
KEYS = {
    "quant_method", "quantization_status", "format", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "sparsity_config", "transform_config", "version",
}  # fmt: skip

# What each mistake leads to, by engine family: the first word of the engine's name.
CONSEQUENCES: dict[Mistake, dict[str, str]] = {
    "no weight": dict.fromkeys(FAMILIES, "loading fails, or it keeps what happened to be in memory"),
    "scale not renamed": {
        "vLLM": "loading fails: there is no parameter weight_scale_inv",
        "SGLang": "loads without an error and produces garbage: the unknown name is passed over, the scale never set",
        "transformers": "loads unscaled with only a warning: every weight is off by the scale of its block",
    },
    "no scale": {
        "vLLM": "loads without an error and keeps the scale's initial value: zeros in older releases, then NaN",
        "SGLang": "loads without an error and keeps the scale's initial value: garbage",
        "transformers": "weights cannot be paired with their scales: loading fails, or they are misscaled",
    },
    "not quantized": {
        "vLLM": "loading fails on a missing parameter: a plain layer has none for packed weights or scales",
        "SGLang": "loads without an error and produces garbage: names it has no parameter for are passed over",
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
        "SGLang": "passed over without a word",
        "transformers": "passed over with a warning",
    },
    "scale dtype": dict.fromkeys(FAMILIES, "the scale is silently rounded on load, and codes no longer fit it"),
}
STOPS = "stops before it loads a tensor"
WARNINGS: tuple[Mistake, ...] = ("scale dtype",)
GARBAGE = (
    "loads without an error and produces garbage: unknown names are passed over, and the experts keep what happened "
    "to be in memory"
)


UNSERVED = "no release of vLLM or SGLang that is known here has a model for this family"
# MLA's module that servers do not multiply with as it is stored: they unpack it once and absorb it into others.
ABSORBED = "kv_b_proj"
UNPACKS = "its source unpacks it by a product with the identity matrix, for any scheme; nobody has run that here"
ONE_SCHEME = "it has one scheme for the experts of all layers, so loading fails; servers read each layer's own"


def check(config: Mapping[str, Any], tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes) -> Consumers:
    """Apply the engines' rules to a checkpoint.

    Args:
        config: config.json.
        tensors: every tensor's dtype (safetensors' spelling) and shape, by name.
        facts, sizes: of its architecture.
    """
    findings = Findings()
    sizes = _stored_layers(tensors, facts, sizes)
    modules, expected = by_module(tensors), expected_modules(facts, sizes)
    _check_names(tensors, modules, expected, facts, sizes, findings)
    stored = (
        (module.kind, describe(modules[name], module.shape)) for name, module in expected.items() if name in modules
    )
    table = {STORED: _by_kind(stored)}
    packed = any("weight_packed" in parts for parts in modules.values())
    rules = _read_section(config.get(SECTION), packed, facts.targets.keys, findings)
    if rules is None:
        return Consumers(table, findings.all())
    readings = {
        engine.name: list(server_readings(engine, facts, sizes, rules))
        for engine in SERVERS
        if engine.key in facts.servers
    }
    if not readings:
        findings.add("warning", SERVER_NAMES, facts.model_type, UNSERVED, "this checkpoint cannot be served by it")
    readings[TRANSFORMERS] = list(transformers_readings(facts, sizes, rules))
    asked = readings.get(VLLM.name) or next(iter(readings.values()))
    differ = len({r.scheme for r in asked if r.kind == EXPERTS} - {None}) > 1
    if differ:
        problem = "the experts' schemes differ between layers"
        findings.add("warning", [TRANSFORMERS], f"{SECTION}.config_groups", problem, ONE_SCHEME)
    for engine, answers in readings.items():
        table[engine] = _by_kind((reading.kind, _text(reading)) for reading in answers)
        for reading in answers:
            if not (differ and engine == TRANSFORMERS and reading.kind == EXPERTS):  # added once, above
                _compare(
                    engine, reading, modules=modules, expected=expected, facts=facts, sizes=sizes, findings=findings
                )
    _note_unverified(readings, findings)
    experts = {reading.scheme for reading in readings[TRANSFORMERS] if reading.kind == EXPERTS}
    other_groups = [targets for targets, s in rules.groups if s not in experts and not names_experts(targets)]
    if len(other_groups) > 1:
        problem = f"{len(other_groups)} groups beside that of the experts"
        findings.add("warning", [TRANSFORMERS], f"{SECTION}.config_groups", problem, "at most one of them is honoured")
    parallel = {ranks: tensor_parallel(ranks, facts, sizes, asked) for ranks in PARALLEL}
    return Consumers(table, findings.all(), parallel if VLLM.name in readings else {})


def _stored_layers(tensors: Mapping[str, Stored], facts: Architecture, sizes: Sizes) -> Sizes:
    """The sizes without the layers that predict further tokens, if config.json declares some but no file has any."""
    prefixes = tuple(facts.layer(layer, "") for layer in sizes.mtp)
    kept = copy.copy(sizes)
    if not any(name.startswith(prefixes) for name in tensors):
        kept.mtp = range(0)
    return kept


def _note_unverified(readings: Mapping[str, Iterable[Reading]], findings: Findings) -> None:
    """Say what has been read in a server's source to work, but has not been seen to."""
    for engine in SERVERS:
        for reading in readings.get(engine.name, ()) if engine.key == VLLM.key else ():
            in_blocks = reading.scheme is not None and reading.scheme.type == "float" and reading.scheme.block
            if in_blocks and reading.asked.endswith(f".{ABSORBED}"):
                problem = f"{reading.scheme} under compressed-tensors is unverified for {ABSORBED}"
                findings.add("note", [engine.name], reading.asked, problem, UNPACKS)


def _text(reading: Reading) -> str:
    return "refused" if reading.refused is not None else str(reading.scheme or "plain")


def _by_kind(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One text per kind; if its members differ, all their texts, each with its count."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, text in pairs:
        counts[kind][text] += 1
    return {
        kind: next(iter(texts))
        if len(texts) == 1
        else ", ".join(f"{text} ({n:,})" for text, n in texts.items()) or NONE
        for kind, texts in counts.items()
    }


def _compare(
    engine: str,
    reading: Reading,
    *,
    modules: Mapping[str, Parts],
    expected: Mapping[str, Module],
    facts: Architecture,
    sizes: Sizes,
    findings: Findings,
) -> None:
    """Compare an engine's reading of a module with the tensors that it will load into it."""
    family = engine.split(maxsplit=1)[0]
    if reading.refused is not None:
        findings.add("error", [engine], reading.asked, f"{reading.kind}: {reading.refused}", STOPS)
        return
    members: Iterable[str] = reading.members
    if reading.kind in (EXPERTS, MTP_EXPERTS) and reading.layer is not None:
        members = (facts.expert(reading.layer, e, matrix) for e in range(sizes["experts"]) for matrix in MATRICES)
    for name in members:
        if name not in modules:
            continue  # reported as missing by `_check_names`
        for mistake, problem in mistakes(reading.scheme, modules[name], expected[name].shape):
            severity: Severity = "warning" if mistake in WARNINGS else "error"
            findings.add(severity, [engine], name, f"{reading.kind}: {problem}", CONSEQUENCES[mistake][family])


def _check_names(
    tensors: Mapping[str, Stored],
    modules: Mapping[str, Parts],
    expected: Mapping[str, Module],
    facts: Architecture,
    sizes: Sizes,
    findings: Findings,
) -> None:
    renamed = misnamed_experts(modules, facts, sizes)
    own = "/".join(facts.expert_linears[matrix].name for matrix in MATRICES)
    names = "/".join(dict.fromkeys(renamed.values()))
    for module in renamed:
        problem = f"experts are stored as {names}; this family's names are {own}"
        findings.add("error", SERVER_NAMES, module, problem, GARBAGE)
        findings.add("error", [TRANSFORMERS], module, problem, "the experts keep random numbers, with only a warning")
    known = (EXPERTS, MTP_EXPERTS) if renamed else ()
    missing = [name for name, m in expected.items() if name not in modules and not m.optional and m.kind not in known]
    for name in (*missing, *(name for name in expected_vectors(facts, sizes) if name not in tensors)):
        problem = f"{module_of(name).rpartition('.')[2]} is missing"
        findings.add("error", ENGINES, name, problem, "loading fails, or it keeps what happened to be in memory")


def _read_section(section: Any, packed: bool, own: Iterable[str], findings: Findings) -> Rules | None:
    """The rules in quantization_config, or None if there are none to apply; adds mistakes in the section itself.

    Args:
        packed: whether the checkpoint has packed integers.
        own: keys of the family's that servers read whatever the method is.
    """
    severity: Severity = "error" if packed else "warning"
    if not isinstance(section, Mapping):
        if packed:
            problem = "missing, though there are packed integers"
            findings.add("error", ENGINES, SECTION, problem, "loading fails: they are taken as not quantized")
        return None
    if section.get("quant_method") != "compressed-tensors":
        problem = f"is {section.get('quant_method')!r}, not 'compressed-tensors'; its rules are not checked here"
        consequence = "loading fails: packed integers are not understood" if packed else "rules of its own apply"
        findings.add(severity, ENGINES, f"{SECTION}.quant_method", problem, consequence)
        return None
    for name in sorted(section.keys() - KEYS - set(own)):
        problem = "no key of compressed-tensors; the source's own section must be replaced as a whole"
        findings.add("warning", ENGINES, f"{SECTION}.{name}", problem, "passed over or misread")
    for where, problem in validation_errors(section):
        # vLLM and SGLang validate the quantization arguments within a group, but not the keys around them.
        engines = ENGINES if {"weights", "input_activations"} & set(where.split(".")) else (TRANSFORMERS,)
        findings.add("error", engines, where, problem, "validation error, before a tensor is loaded")
    try:
        return read_rules(section)
    except Refused as refused:
        findings.add("error", ENGINES, SECTION, str(refused), STOPS)
        return None


def validation_errors(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Key and message of every error that compressed-tensors' own QuantizationConfig reports."""
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    try:
        QuantizationConfig.model_validate(copy.deepcopy(dict(section)))
    except ValidationError as failure:
        errors = []
        for error in failure.errors():
            # pydantic also tries a group as a list of targets, for a preset; that branch's message would mislead.
            if "list[str]" not in error["loc"]:
                path = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
                errors.append((".".join([SECTION, *path]), error["msg"]))
        return errors
    except (KeyError, TypeError, ValueError) as failure:
        return [(SECTION, str(failure).strip("'\""))]
    return []
