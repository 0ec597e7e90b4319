"""The serving check: how each engine would read a checkpoint, from its config.json and headers.

engines.py says which scheme an engine gives a module; here that is compared with how the module is stored, and the
shapes are checked that tensor parallelism leaves on each rank. Most of these mistakes cause no error on loading, or one
that points elsewhere. A matrix of known shape is stored as packed integers or NVFP4 (`weight_packed`, `weight_scale`),
FP8 (`weight`, `weight_scale`) or plain (`weight`); bits, group size and block follow from the shapes.

What servers make of scales for an FP8 cache of keys and values (`kv_cache_scheme`, `self_attn.k_scale`, `.v_scale`):

    vLLM          the cache is FP8 by itself, unless --kv-cache-dtype says otherwise. A scale that is missing is 1, and
                  one under another name is dropped, both without a word. FlashInfer multiplies by the scales even if
                  the cache is not quantized
    SGLang        the same for a scheme per tensor, but only some of its models load the scales; the others take 1
    transformers  rounds keys and values so, with or without a cache

From the sources of vLLM 0.33 (compressed_tensors.py, CompressedTensorsKVCacheMethod, and base_config.py,
get_cache_scale_mapper), SGLang 0.5.23 (each model's load_weights) and transformers 5.17.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.checkpoint.reader import CONFIG, open_folder
from quantizers.checkpoint.remote import HubFiles
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Stored
from quantizers.formats.e8m0 import DTYPES, E8M0, GROUP
from quantizers.formats.format import PACKED, SCALE
from quantizers.formats.fp8 import SCALE_INV, Fp8Blocks
from quantizers.formats.mxfp4 import Mxfp4
from quantizers.formats.mxfp8 import Mxfp8
from quantizers.formats.nvfp4 import INPUT_SCALE, Nvfp4
from quantizers.formats.packed_integers import GROUP_INDEX, SHAPE, ZERO_POINT
from quantizers.planning.gpus import lacking_facts
from quantizers.planning.plan import KV_SCALES
from quantizers.recipe.cards import CARDS
from quantizers.system.errors import InputError

from . import engines
from .engines import (
    EXPERTS,
    KINDS,
    MTP_EXPERTS,
    REFUSED,
    SERVERS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Lookup,
    ServedScheme,
)
from .findings import NONE, Remark, ServingCheck, Severity, findings_of
from .kernels import (
    HUMMING,
    NO_E8M0,
    condition,
    for_ktransformers,
    is_packed,
    marlin_obstacles,
    moe_kernels,
    on_card,
    refusal,
)
from .memory import obstacles

Mistake = Literal[
    "no weight", "scale not renamed", "no scale", "not quantized", "not plain", "another scheme", "extra", "scale dtype"
]  # fmt: skip
Lookups = Mapping[str, Sequence[Lookup]]  # by engine
Parts = Mapping[str, Stored]  # a module's tensors, by the last part of their names
SECTION = "quantization_config"
KV_SCHEME = "kv_cache_scheme"
ASYMMETRIC = (ZERO_POINT, GROUP_INDEX)
STORED = "stored as"
SERVER_NAMES = tuple(engine.name for engine in SERVERS)
ENGINES = (*SERVER_NAMES, TRANSFORMERS)
VLLM_NAMES = tuple(engine.name for engine in SERVERS if not engine.is_sglang)
SGLANG_LOADS = ("minimax_m2", "llama", "qwen3_5_moe")  # model types whose scales for a cache it loads
PARALLEL = (1, 2, 4, 8)
KEYS = {
    "quant_method", "quantization_status", "format", "config_groups", "ignore", KV_SCHEME, "global_compression_ratio",
    "sparsity_config", "transform_config", "version",
}  # fmt: skip
# Model types whose class in vLLM 0.32 has no name for an expert's matrix, and says nothing.
NO_MATRICES = ("aria", "gpt_oss")
NOT_CHECKED = "nothing is known here of the servers of this model type, so none was checked"
MAY_SERVE = "it may serve this or not: vLLM's Transformers backend takes many types that vLLM has no model for"
UNINITIALIZED = "loading fails, or the parameter stays uninitialized"
REFUSES = "refuses it before loading a tensor"
OWN_HEAD = "its class has another head, which stays uninitialized; quantize a source that stores lm_head.weight too"
ONE_SCHEME = "it has one scheme for the experts of all layers, so loading fails; servers read each layer's own"
GARBAGE = "loads without an error and produces garbage"
UNREAD = f"it reads no expert's own matrices of this type, {GARBAGE}"
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
READS_POWERS = "5.17 reads them; 5.24 loads wrong numbers without an error, for it multiplies in the scale's own dtype"
CACHE_ON_CARDS = (
    "its cache becomes FP8, which GPUs of SM80 to 88 have with FlashInfer alone; --kv-cache-dtype bfloat16 turns it "
    "off, but FlashInfer would multiply by the scales all the same; FlashAttention 3 and Triton quantize the query too"
)
TAKES_ONES = "its cache becomes FP8, but its model of this type loads no scales: it takes 1 without a word"


# The check ---------------------------------------------------------------------------------------------------------


def check_folder(folder: Path, own: Own = None, remote: HubFiles | None = None) -> ServingCheck | None:
    """`check` of a checkpoint folder; None if it cannot be opened, which the audit reports.

    `own` is its architecture, or a file of the user's with it, None for a kept one; shards that are not in the folder
    are `remote`.
    """
    try:
        candidate = open_folder(folder, strays=True, remote=remote)
        facts = architecture_for(candidate.config, str(folder / CONFIG), own)
    except InputError:
        return None
    return check(candidate.config, candidate.tensors, facts)


def check(config: Mapping[str, Any], tensors: Mapping[str, Stored], facts: Architecture) -> ServingCheck:
    """Apply the engines' rules to a checkpoint: its config.json, and every tensor's dtype and shape by name."""
    facts = _without_absent_mtp(tensors, facts)
    stored: dict[str, dict[str, Stored]] = {}  # by module, then by the last part of a tensor's name
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        stored.setdefault(module, {})[part] = info
    modules, remarks = engines.model_modules(facts), list[Remark]()
    section: Any = config.get(SECTION)
    if not config.get("architectures"):
        problem = "missing; servers look the model's class up by it"
        remarks.append(("error", SERVER_NAMES, f"{CONFIG}: architectures", problem, "loading fails"))
    remarks += _name_remarks(tensors, stored, modules, facts)
    table = {STORED: _by_kind((m.kind, describe(stored[m.name], m.shape)) for m in modules if m.name in stored)}
    packed = any(PACKED in parts for parts in stored.values())
    if packed and facts.model_type in NO_MATRICES:
        problem = "its class in vLLM reads a layer's experts in one tensor alone, and passes over matrices of their own"
        remarks.append(("warning", VLLM_NAMES, facts.model_type, problem, UNREAD))
    rules = _read_section(section, packed, facts.section_keys, remarks)
    if rules is None:
        return ServingCheck(table, findings_of(remarks))
    remarks += _cache_remarks(section, tensors.keys(), facts)
    servers = [server for server in SERVERS if server.key in facts.servers] or [engines.UNKNOWN_SERVER]
    own_head = [server.name for server in servers if not engines.server_facts(server, facts).ties_head]
    if facts.servers and facts.head == facts.embedding and own_head:
        remarks.append(("warning", own_head, facts.head, "there is no other head", OWN_HEAD))
    lookups = {server.name: list(engines.server_lookups(server, facts, rules, modules)) for server in servers}
    if engines.UNKNOWN_SERVER in servers:
        remarks.append(("warning", SERVER_NAMES, facts.model_type, NOT_CHECKED, MAY_SERVE))
    lookups[TRANSFORMERS] = list(engines.transformers_lookups(facts, rules, modules))
    one_scheme = len({lookup.scheme for lookup in lookups[servers[0].name] if lookup.kind == EXPERTS} - {None}) < 2
    if not one_scheme:
        problem = "the experts' schemes differ between layers"
        remarks.append(("warning", [TRANSFORMERS], f"{SECTION}.config_groups", problem, ONE_SCHEME))
    refused = _without_kernel(servers, lookups)
    by_all = {engine for engine, _ in refused} == {server.name for server in servers}
    remarks += _kernel_remarks(lookups, refused, "error" if by_all else "warning")
    for engine, answers in lookups.items():
        table[engine] = _by_kind(
            (lookup.kind, REFUSED if (engine, lookup.asked) in refused else lookup.answer) for lookup in answers
        )
        for lookup in answers:
            if one_scheme or engine != TRANSFORMERS or lookup.kind != EXPERTS:
                remarks += _lookup_remarks(engine, lookup, stored)
    schemes = (lookup.scheme for lookup in lookups.get(SGLANG.name, ()) if lookup.kind == EXPERTS)
    ktransformers = for_ktransformers(facts, schemes) if "sglang" in facts.servers else None
    answers = lookups.get(VLLM.name, [])
    parallel = {ranks: tensor_parallel(ranks, facts, answers) for ranks in PARALLEL if answers}
    return ServingCheck(table, findings_of(remarks), parallel, ktransformers, _kernels_by_card(servers, lookups, facts))


def _without_kernel(servers: Iterable[engines.Engine], lookups: Lookups) -> dict[tuple[str, str], str]:
    """Reasons why servers refuse packed integers, by the server's name and the name that it looks up."""
    refused = {}
    for server in servers:
        for lookup in lookups[server.name]:
            if reason := refusal(server, lookup):
                refused[server.name, lookup.asked] = reason
    return refused


def _kernels_by_card(
    servers: Iterable[engines.Engine], lookups: Lookups, facts: Architecture
) -> dict[str, dict[str, str]]:
    """The field `kernels` of a ServingCheck."""
    kernels = {}
    for server in servers:
        if server not in (VLLM, SGLANG):
            continue
        answers = lookups[server.name]
        for card in CARDS:
            if card == NO_E8M0 or (server.is_sglang and card == "vllm-cpu"):
                continue
            row = _by_kind((lookup.kind, on_card(server, card, lookup, facts)) for lookup in answers)
            kernels[f"{server.name} on {card}"] = row
    return kernels


def _without_absent_mtp(tensors: Mapping[str, Stored], facts: Architecture) -> Architecture:
    """The facts without MTP layers, if config.json declares some but no file has any: most tools leave them out."""
    prefixes = tuple(facts.layer(layer, "") for layer in facts.mtp_layers)
    has_any = any(name.startswith(prefixes) for name in tensors)
    return facts if has_any else facts.model_copy(update={"mtp": None})


def _by_kind(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One text per kind of module; if its members differ, all their texts with counts."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for kind, text in pairs:
        counts[kind][text] += 1
    return {
        kind: ", ".join(text if len(texts) == 1 else f"{text} ({n:,})" for text, n in texts.items()) or NONE
        for kind, texts in counts.items()
    }


def _kernel_remarks(lookups: Lookups, refused: Mapping[tuple[str, str], str], severity: Severity) -> Iterator[Remark]:
    """Packed integers for which an engine has no kernel, of this severity, or has one on a condition."""
    groups: dict[tuple[Severity, str, str, str], list[Lookup]] = {}  # lookups about which the same is to be said
    for engine, answers in lookups.items():
        for lookup in answers:
            if reason := refused.get((engine, lookup.asked)):
                groups.setdefault((severity, engine, lookup.kind, f"{REFUSES}: {reason}"), []).append(lookup)
            elif needed := condition(engine, lookup):
                groups.setdefault(("warning", engine, lookup.kind, needed), []).append(lookup)
    for (level, engine, kind, consequence), alike in groups.items():
        schemes = [lookup.scheme for lookup in alike if lookup.scheme]
        names = sorted({f"INT{scheme.bits}" if is_packed(scheme) else str(scheme) for scheme in schemes})
        for lookup in alike:
            yield level, [engine], lookup.asked, f"{kind}: {', '.join(names)}", consequence


def _lookup_remarks(engine: str, lookup: Lookup, stored: Mapping[str, Parts]) -> Iterator[Remark]:
    """An engine's scheme for a module against the tensors that it will load into it."""
    if lookup.refused is not None:
        yield "error", [engine], lookup.asked, f"{lookup.kind}: {lookup.refused}", REFUSES
        return
    for member in lookup.members:
        if member.name not in stored:
            continue  # see `_name_remarks`
        if engine == TRANSFORMERS and lookup.kind == EXPERTS and _is_taken_plain(lookup.scheme, stored[member.name]):
            continue
        if engine == TRANSFORMERS and _has_powers(lookup.scheme, stored[member.name]):
            yield "warning", [engine], member.name, f"{lookup.kind}: FP8 blocks with scales in {E8M0}", READS_POWERS
        for mistake, problem in mistakes(lookup.scheme, stored[member.name], member.shape):
            severity: Severity = "warning" if mistake == "scale dtype" else "error"
            yield severity, [engine], member.name, f"{lookup.kind}: {problem}", CONSEQUENCES[mistake]


def _is_taken_plain(scheme: ServedScheme | None, parts: Parts) -> bool:
    """Whether transformers takes an expert's matrix as it is, though its one scheme for experts is attention's.

    Weights in 8 bits that have no scale pass through its `DecompressExperts`.
    """
    in_fp8 = scheme is not None and (scheme.type, scheme.bits) == ("float", 8)
    return in_fp8 and SCALE not in parts and "weight" in parts and parts["weight"].dtype in FLOATING


def _has_powers(scheme: ServedScheme | None, parts: Parts) -> bool:
    """Whether a module is in FP8 blocks whose scales are powers of two in a byte."""
    return scheme is not None and isinstance(scheme.form, Fp8Blocks) and SCALE in parts and parts[SCALE].dtype == E8M0


def _name_remarks(
    tensors: Mapping[str, Stored],
    stored: Mapping[str, Parts],
    modules: Sequence[engines.Module],
    facts: Architecture,
) -> Iterator[Remark]:
    """Experts under another family's names, and missing tensors."""
    right = [facts.expert_linears[matrix].name for matrix in facts.matrices]
    prefixes = [
        facts.layer(layer, facts.expert_prefix.format(expert=expert))
        for layer in (*facts.moe_layers, *facts.mtp_layers)
        for expert in range(facts.num_experts)
    ]
    others = [name for name in (*PROJECTIONS.values(), "w1", "w3", "w2") if name not in right]
    misnamed = [(prefix + other, other) for prefix in prefixes for other in others if prefix + other in stored]
    names = "/".join(dict.fromkeys(other for _, other in misnamed))
    for module, _ in misnamed:
        problem = f"experts are stored as {names}; this family's names are {'/'.join(right)}"
        yield "error", SERVER_NAMES, module, problem, f"{GARBAGE}: unknown names are silently ignored"
        yield "error", [TRANSFORMERS], module, problem, "the experts keep random numbers, with only a warning"
    reported = (EXPERTS, MTP_EXPERTS) if misnamed else ()
    missing = [m.name for m in modules if m.name not in stored and not m.optional and m.kind not in reported]
    # Of the tensors that are not matrices: norms, biases and the router's correction bias.
    named = dict(facts.outside)
    for layer in (*range(facts.num_layers), *facts.mtp_layers):
        named |= {facts.layer(layer, name): tensor for name, tensor in facts.of_layer(layer).tensors.items()}
    for name, tensor in named.items():
        if len(tensor.shape) == 1 and not tensor.optional and name not in tensors:
            missing.append(name)
    for name in missing:
        problem = f"{engines.module_of(name).rpartition('.')[2]} is missing"
        yield "error", ENGINES, name, problem, UNINITIALIZED


def _read_section(section: Any, packed: bool, extra: Iterable[str], remarks: list[Remark]) -> engines.Rules | None:
    """The rules in quantization_config, None if there are none to apply. Mistakes in the section itself are added.

    The checkpoint has `packed` integers or not; `extra` are keys of the family that servers read for any method.
    """
    if not isinstance(section, Mapping):
        if packed:
            problem = "missing, though there are packed integers"
            remarks.append(("error", ENGINES, SECTION, problem, "loading fails: they are taken as not quantized"))
        return None
    if section.get("quant_method") != "compressed-tensors":
        problem = f"is {section.get('quant_method')!r}, not 'compressed-tensors'; its rules are not checked here"
        consequence = "loading fails: packed integers are not understood" if packed else "other rules apply"
        severity: Severity = "error" if packed else "warning"
        remarks.append((severity, ENGINES, f"{SECTION}.quant_method", problem, consequence))
        return None
    for name in sorted(section.keys() - KEYS - set(extra)):
        problem = "not a key of compressed-tensors; the source's own section must be replaced as a whole"
        remarks.append(("warning", ENGINES, f"{SECTION}.{name}", problem, "ignored or misread"))
    errors = _validation_errors(section)
    for where, problem in errors:
        # vLLM and SGLang validate the quantization arguments within a group, but not the keys around them.
        affected = ENGINES if {"weights", "input_activations"} & set(where.split(".")) else (TRANSFORMERS,)
        remarks.append(("error", affected, where, problem, "validation error before a tensor is loaded"))
    try:
        return engines.read_rules(section)
    except engines.Refused as refused:
        if not any("weights" in where for where, _ in errors):
            remarks.append(("error", ENGINES, SECTION, str(refused), REFUSES))
        return None


def _validation_errors(section: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Key and message of every error of compressed-tensors' own QuantizationConfig."""
    from compressed_tensors.quantization import QuantizationConfig
    from pydantic import ValidationError

    try:
        QuantizationConfig.model_validate(copy.deepcopy(dict(section)))
    except ValidationError as failure:
        # pydantic also tries a group as a list of targets, for a preset; that branch's message would mislead.
        errors = [(e["loc"], e["msg"]) for e in failure.errors() if "list[str]" not in e["loc"]]
        return [(_key_path(place), message) for place, message in errors]
    except (KeyError, TypeError, ValueError) as failure:
        return [(SECTION, str(failure).strip("'\""))]
    return []


def _key_path(place: Sequence[str | int]) -> str:
    """The path of a key in config.json, of pydantic's place of an error, in which its validators stand too."""
    keys = [str(key) for key in place if not str(key).startswith("function-")]
    return ".".join([SECTION, *keys])


def _cache_remarks(section: Mapping[str, Any], tensors: Collection[str], facts: Architecture) -> Iterator[Remark]:
    """Check the scales of an FP8 KV cache, if `section` declares them or `tensors` holds any."""
    attention = {n: name for n in range(facts.num_layers) if (name := facts.of_layer(n).cached) is not None}
    names = [facts.layer(n, f"{module}.{scale}") for n, module in attention.items() for scale in KV_SCALES]
    place, problem = f"{SECTION}.{KV_SCHEME}", "scales for an FP8 cache of keys and values"
    if not section.get(KV_SCHEME):
        for name in (name for name in names if name in tensors):
            consequence = "not loaded, or multiplied into keys and values that are not quantized"
            yield "error", [*VLLM_NAMES, SGLANG.name], name, f"a scale without {KV_SCHEME}", consequence
        return
    for name in (name for name in names if name not in tensors):
        yield "error", ENGINES, name, "missing", "it takes 1 without a word"
    if "vllm" in facts.servers or not facts.servers:
        yield "warning", VLLM_NAMES, place, problem, CACHE_ON_CARDS
    if "sglang" in facts.servers and facts.model_type not in SGLANG_LOADS:
        yield "warning", [SGLANG.name], place, problem, TAKES_ONES
    if bare := [n for n in (*range(facts.num_layers), *facts.mtp_layers) if n not in attention]:
        where = f"layers {', '.join(map(str, bare))} have none"
        consequence = "where such a layer has a cache of keys and values, it is filled with scales of 1"
        yield "warning", VLLM_NAMES, place, where, consequence


# As stored ---------------------------------------------------------------------------------------------------------


def describe(parts: Parts, shape: tuple[int, ...]) -> str:
    """Describe how a module is stored, in the words of `str(ServedScheme)`."""
    scale = parts.get(SCALE)
    if PACKED in parts and parts[PACKED].dtype == "U8" and scale is not None and scale.dtype in DTYPES:
        return str(Mxfp4())
    if PACKED in parts and parts[PACKED].dtype == "U8":
        return str(Nvfp4(4 if INPUT_SCALE in parts else 16))
    if PACKED in parts:
        name = f"INT{parts[PACKED].shape[-1] * 32 / shape[-1]:g}"
        if scale is None:
            return f"{name} without a scale"
        if len(scale.shape) < 2 or not scale.shape[-1]:
            return f"{name} with a scale of shape {list(scale.shape)}"
        return f"{name} group {shape[-1] // scale.shape[-1]}"
    if "weight" not in parts:
        return "no weight"
    dtype = parts["weight"].dtype
    if dtype != FP8:
        return dtype if scale is None else f"{dtype} with a scale"
    if scale is None:
        return f"FP8 with {SCALE_INV}" if SCALE_INV in parts else "FP8 without a scale"
    if scale.dtype in DTYPES and scale.shape == (shape[0], shape[-1] // GROUP):
        return str(Mxfp8()) if scale.dtype != E8M0 else f"{Mxfp8()} with scales in {E8M0}"
    if math.prod(scale.shape) == 1 and math.prod(shape) > 128 * 128:
        return "FP8 per tensor"
    if scale.shape[0] == shape[0]:
        return "FP8 per channel"
    return f"FP8 block {'x'.join(str(_block(n, count)) for n, count in zip(shape, scale.shape, strict=False))}"


def _block(size: int, count: int) -> int:
    """The edge of a block: 128 if that gives `count` blocks, else the smallest edge that does."""
    return 128 if math.ceil(size / 128) == count else math.ceil(size / max(count, 1))


def mistakes(scheme: ServedScheme | None, parts: Parts, shape: tuple[int, ...]) -> list[tuple[Mistake, str]]:
    """The mistakes in these tensors under this scheme (None: not quantized): kind and one sentence each.

    Schemes that this program never writes are not checked.
    """
    problems: list[tuple[Mistake, str]] = []
    if scheme is None or scheme.symmetric:
        problems += [("extra", f"{part} belongs to no symmetric scheme") for part in ASYMMETRIC if part in parts]
    if PACKED in parts and "weight" in parts:
        problems.append(("extra", f"weight and {PACKED} are both present"))
    if PACKED not in parts and "weight" not in parts:
        return [*problems, ("no weight", f"neither weight nor {PACKED} is present")]
    if SCALE_INV in parts and SCALE not in parts:
        return [*problems, ("scale not renamed", f"the FP8 scale is called {SCALE_INV}; it must be {SCALE}")]
    quantized = PACKED in parts or SCALE in parts or parts["weight"].dtype not in FLOATING
    stored = describe(parts, shape)
    if scheme is None:
        text = f"no group matches: it is taken as not quantized, but is stored as {stored}"
        return [*problems, ("not quantized", text)] if quantized else problems
    takes = f"takes the scheme {scheme} ({scheme.origin}), but is stored as {stored}"
    if not quantized:
        return [*problems, ("not plain", takes)]
    needed = _required(scheme, shape)
    if needed is None:
        return problems
    fits = all(parts[part].dtype in dtypes and tuple(parts[part].shape) == size
               for part, (dtypes, size) in needed.items() if part in parts)  # fmt: skip
    if not fits or next(iter(needed)) not in parts:
        return [*problems, ("another scheme", takes)]
    for scale in needed:
        if scale not in parts:
            return [*problems, ("no scale", f"{scale} is missing: stored as {stored}")]
    if INPUT_SCALE in parts and INPUT_SCALE not in needed and isinstance(scheme.form, Nvfp4):
        problems.append(("extra", f"{INPUT_SCALE} belongs to no scheme of weights alone"))
    if PACKED in parts and needed[SCALE][0] == FLOATING and parts[SCALE].dtype != "BF16":
        problems.append(("scale dtype", f"the scale is {parts[SCALE].dtype}, not BF16"))
    return problems


Needed = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # dtypes and shape, by the last part of a tensor's name


def _required(scheme: ServedScheme, shape: tuple[int, ...]) -> Needed | None:
    """The tensors that a scheme needs for a matrix, weight first; None for schemes that this program never writes."""
    if scheme.form is None:
        return None
    read = {part: spec for part, spec in scheme.form.parts(shape) if part != SHAPE}  # which nothing reads
    # Servers copy the scales of blocks into float32, F8_E8M0 as the numbers they are, see formats/e8m0.py.
    numbers = (*FLOATING, E8M0) if isinstance(scheme.form, Fp8Blocks) else FLOATING
    return {
        part: (numbers if part == SCALE and spec.dtype in FLOATING else (spec.dtype,), spec.shape)
        for part, spec in read.items()
    }


# Tensor parallelism ------------------------------------------------------------------------------------------------


def tensor_parallel(ranks: int, facts: Architecture, lookups: Sequence[Lookup]) -> str:
    """`ok`, or the first reason why vLLM cannot split a checkpoint among tensor-parallel ranks, or why that is unknown.

    The rules for outputs of this program are in memory.py. Other checkpoints may also break those of
    the Marlin kernel, or have experts in FP8 blocks. The lookups are vLLM's.
    """
    if problem := lacking_facts(facts):
        return problem
    experts = {lookup.scheme for lookup in lookups if lookup.kind == EXPERTS and lookup.scheme}
    groups = {scheme.group_size for scheme in experts if scheme.group_size}
    linears = facts.every_linear()
    blocks = {
        name: lookup.scheme.block
        for lookup in lookups
        for member in lookup.members
        if (name := member.name.removeprefix(facts.layer(member.layer or 0, ""))) in linears
        if lookup.scheme and lookup.scheme.block
    }
    problems = obstacles(ranks, facts, groups, blocks)
    return next(chain(problems, _expert_obstacles(ranks, facts, experts)), "ok")


def _expert_obstacles(ranks: int, facts: Architecture, schemes: Iterable[ServedScheme]) -> Iterator[str]:
    hidden, share = facts.expert_inputs, facts.expert_width // ranks
    if ranks > facts.num_experts:
        yield f"there are only {facts.num_experts} experts"
    for scheme in schemes:
        group = scheme.group_size if scheme.type == "int" else None
        if group and hidden % group:
            yield f"hidden size {hidden} is not a multiple of the group, {group}"
        if group and moe_kernels(scheme) != (HUMMING,):
            yield from marlin_obstacles(scheme, hidden)
        if scheme.type == "int" and share * scheme.bits % 32:
            yield f"the experts' {share} columns per rank in {scheme.bits} bits do not fill words of 32 bits"
        if scheme.type != "int" and scheme.block and share % scheme.block[0]:
            yield f"the experts' width per rank, {share}, is not a multiple of the FP8 block, {scheme.block[0]}"
