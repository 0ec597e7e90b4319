"""How vLLM reads a checkpoint of AutoAWQ or GPTQ: its rules for their quantization_config, and what they stumble on.

Both formats are found by module, like compressed-tensors', but by other rules:

    AutoAWQ   quantized unless an entry of modules_to_not_convert occurs in the module's name; without the key, what the
              files store decides. 4 bits only
    GPTQ      a linear layer: if an entry of modules_in_block_to_quantize occurs in its name; without the key, what the
              files store decides. Experts: always. Then `dynamic`, each rule matched from the name's start, the first
              that matches decides. 4 or 8 bits, symmetric, not in act-order

The names are vLLM's own: q, k and v are one module, gate and up of a dense MLP another, all experts of a layer a third.
So a rule about `q_proj` or `experts.3` matches nothing, and what the file stores differently does not load. The head is
quantized only where `lm_head` is true. Taken from vLLM 0.32: quantization/auto_awq.py, auto_gptq.py,
utils/gptq_utils.py, and `is_layer_skipped` of utils/quant_utils.py. The rules of other engines, and vLLM's for
AutoRound, are not known here, and a finding says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.integer_words_config import Words, read_words
from quantizers.system.errors import CheckpointError

from .config_groups import Refused, Rules
from .findings import Findings
from .readings import TRANSFORMERS, server_readings
from .rules import EMBEDDINGS, EXPERTS, HEAD, MTP_EXPERTS, MTP_OTHER, ROUTER, SERVERS, VLLM
from .tensors import FLOATING, Module, Parts, describe, words_scheme

SECTION = "quantization_config"
NEEDED = {"awq": ("zero_point",), "gptq": ("desc_act", "sym")}  # beside bits and group_size
STOPS = "stops before it loads a tensor"
PLAIN = "plain"
NO_RULES = Rules({}, (), (), "")  # of compressed-tensors
MISMATCH = "loading fails: its parameters have other names or shapes than the tensors"


def check_words(
    section: Mapping[str, Any],
    modules: Mapping[str, Parts],
    facts: Architecture,
    sizes: Sizes,
    expected: Mapping[str, Module],
    findings: Findings,
) -> list[tuple[str, str]]:
    """Add what vLLM stumbles on in a section of has_words.

    Args:
        modules: the checkpoint's tensors by module.
        expected: every matrix that an engine may quantize.

    Returns:
        Of each matrix its kind and the scheme that vLLM gives it; empty if it stops, or its rules are not known.
    """
    method, where = section["quant_method"], f"{SECTION}.quant_method"
    known = [VLLM.name] if method in NEEDED and VLLM.key in facts.servers else []
    unknown = [name for name in (*(engine.name for engine in SERVERS), TRANSFORMERS) if name not in known]
    findings.add("warning", unknown, where, f"is {method!r}; its rules are not checked here", "it may misread it")
    if not known:
        return []
    try:
        words = read_words(section, SECTION)
    except CheckpointError as failure:
        findings.add("error", [VLLM.name], SECTION, str(failure), "it stops, or misreads it")
        return []
    stops = list(_stops(section, words))
    for key, problem in stops:
        findings.add("error", [VLLM.name], f"{SECTION}.{key}", problem, STOPS)
    if stops:
        return []
    answers: list[tuple[str, str]] = []
    listed = _listed(section, words, modules)
    plain = [EMBEDDINGS, MTP_OTHER, *([] if facts.servers[VLLM.key].asks_for_router else [ROUTER])]
    plain += [] if section.get("lm_head") else [HEAD]
    together = VLLM.of_family(facts).fused
    for kind, name, members in _asked(facts, sizes):
        try:
            quantized = kind not in plain and _is_quantized(kind, name, words, listed, together)
        except Refused as refused:
            findings.add("error", [VLLM.name], name, f"{kind}: {refused}", STOPS)
            answers.append((kind, "refused"))
            continue
        for member in members:
            shape = expected[member].shape
            taken = _text(words, name, shape) if quantized else PLAIN
            answers.append((kind, taken))
            if member not in modules:
                continue  # reported as missing elsewhere
            stored = describe(modules[member], shape) if "qweight" in modules[member] else PLAIN
            if stored != taken:
                problem = f"{kind}: is taken as {taken} under the name {name}, but stored as {stored}"
                findings.add("error", [VLLM.name], member, problem, MISMATCH)
    return answers


def _stops(section: Mapping[str, Any], words: Words) -> Iterator[tuple[str, str]]:
    """Keys at which vLLM stops, with what is wrong."""
    for key in NEEDED[section["quant_method"]]:
        if key not in section:
            yield key, "is missing; vLLM needs it"
    if words.layout == "gptq":
        rules = section.get("dynamic") or {}
        for place, keys in (("", section), *((f"dynamic[{name!r}].", rule) for name, rule in rules.items())):
            if not isinstance(keys, Mapping) or place.startswith("dynamic['-:"):
                continue
            if keys.get("desc_act", section.get("desc_act")) and keys.get("group_size", words.group) != -1:
                yield f"{place}desc_act", "is true: groups in act-order are no longer supported"
            if keys.get("sym", section.get("sym")) is False:
                yield f"{place}sym", "is false: only symmetric integers are supported"


def _asked(facts: Architecture, sizes: Sizes) -> Iterator[tuple[str, str, list[str]]]:
    """Every module that vLLM asks about: its kind, vLLM's name for it, and the checkpoint's modules in it."""
    for reading in server_readings(VLLM, facts, sizes, NO_RULES):
        members = list(reading.members)
        if reading.kind in (EXPERTS, MTP_EXPERTS) and reading.layer is not None:
            members = [facts.expert(reading.layer, e, matrix) for e in range(sizes["experts"]) for matrix in MATRICES]
        yield reading.kind, reading.asked, members


def _listed(section: Mapping[str, Any], words: Words, modules: Mapping[str, Parts]) -> list[str]:
    """The entries that decide about linear layers: AutoAWQ's of what is left out, GPTQ's of what is quantized.

    Where the section has none, vLLM takes every module that holds no integers, or every one that does.
    """
    key = "modules_to_not_convert" if words.layout == "awq" else "modules_in_block_to_quantize"
    given = _flat(section.get(key) or [])
    if given:
        return given
    integers = {
        module for module, parts in modules.items() if any(part.dtype not in FLOATING for part in parts.values())
    }
    return [module for module in modules if (module in integers) != (words.layout == "awq")]


def _is_quantized(
    kind: str, name: str, words: Words, listed: Sequence[str], together: Mapping[str, Sequence[str]]
) -> bool:
    """Whether vLLM builds a module for integers.

    Args:
        listed: see `_listed`.
        together: `Engine.fused`.

    Raises:
        Refused: the parts of a fused layer differ.
    """
    if words.layout == "awq":
        return not _occurs(listed, name, together)
    if words.of(name) is None:
        return False
    return kind in (EXPERTS, MTP_EXPERTS) or not listed or _occurs(listed, name, together, whole=False)


def _occurs(entries: Sequence[str], name: str, together: Mapping[str, Sequence[str]], whole: bool = True) -> bool:
    """Whether an entry occurs in a module's name, or in those of all parts of a fused layer.

    Args:
        whole: look into the fused layer's own name first.

    Raises:
        Refused: only in those of some.
    """
    parent, _, last = name.rpartition(".")
    names = [f"{parent}.{part}" for part in together.get(last, ())]
    if not names or (whole and any(entry in name for entry in entries)):
        return any(entry in name for entry in entries)
    found = [any(entry in part for entry in entries) for part in names]
    if any(found) and not all(found):
        raise Refused(f"only some of {', '.join(together[last])} are quantized, which are one layer")
    return all(found)


def _flat(entries: Any) -> list[str]:
    return [name for entry in entries for name in _flat(entry)] if isinstance(entries, list) else [str(entries)]


def _text(words: Words, name: str, shape: tuple[int, ...]) -> str:
    """The scheme of a module of vLLM's for a matrix (R, C), worded like `describe`."""
    bits, group = words.of(name) or (words.bits, words.group)
    return words_scheme(words.layout, bits, group, shape[1])
