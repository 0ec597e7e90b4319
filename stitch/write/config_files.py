"""Config, index and tokenizer files of an output; config.json's section for FP8 attention and integer experts.

Validated against compressed-tensors 0.17 to 0.20, vLLM and transformers: only old fields, no null options in a scheme.
A checkpoint that breaks one of these rules loads without an error, or fails only when it is served in another way:

- The expert regex must match older and newer vLLM's names (w1/w2/w3 and gate/up/down_proj, below `mlp.experts`).
- The attention regex must match the fused qkv_proj, for SGLang.
- No group may target a class name such as "Linear".
- Experts of MTP layers are not quantized. A server builds these layers for speculative decoding only, and looks them up
  like any other layer (vLLM) or under a separate name (SGLang).
- transformers applies the first group that names experts to the routed ones, even if it targets shared experts.

Where nobody wrote `targets` for a model type, they are made from the names of a plan's modules. A server looks a module
up under its own name: often with another prefix, fused with others, or below another parent. So each expression is the
shortest end of a name that matches modules of one scheme only, and nothing that servers fuse of others:

    decoder layers      the end of the name; with the layers' numbers where a module is FP8 in some of them only
    routed experts      by number, under the published names of their matrices and under those of every server
    everything else     below one name, such as a vision tower: that name if all of it is plain, else as for layers
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture, Targets
from quantizers.architectures.contradictions import TEXT, TIED, dtypes_of, untied
from quantizers.architectures.fused import FUSED_IN_SOME, NO_MATRIX
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.architectures.whole_class import model_class
from quantizers.checkpoint.reader import CONFIG, INDEX, Checkpoint, side_files
from quantizers.checkpoint.safetensors_header import FP8, TORCH_DTYPES
from quantizers.formats.format import QuantizedFormat, arguments
from quantizers.formats.plain import Plain
from quantizers.formats.stored_matrices import quantized_matrices
from quantizers.formats.unsupported import FEW_BITS
from quantizers.planning.plan import Action, Plan, index_json
from quantizers.system.files import copy_file, write_text

Group = QuantizedFormat | Literal["plain", "experts"]  # what covers a module: a config group, or `ignore`
PLAIN: Literal["plain"] = "plain"
ANYWHERE = r"(.*\.)?"
# Keys from which vLLM 0.32 knows that a table is FP8 with one scale (models/qwen4_exp/common/ngram_embedding.py): where
# quant_method is compressed-tensors it takes it for one in 16 bits otherwise.
TABLE_DTYPES = {"qwen4_exp": "ple_embedding_dtype", "qwen4_exp_text": "ple_embedding_dtype"}


def write_config_files(folder: Path, source: Checkpoint, plan: Plan, facts: Architecture) -> None:
    """Write index, config.json and the source's side files into a folder of finished shards.

    Any other file there is removed first: an earlier attempt may have had other options.
    """
    shards = plan.shards()
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in shards:
            path.unlink()
    for file in side_files(source.folder):
        copy_file(file, folder / file.relative_to(source.folder))
    write_text(index_json(plan), folder / INDEX)
    config = output_config(source.config, facts, plan)
    write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)


def output_config(source: dict[str, Any], facts: Architecture, plan: Plan) -> dict[str, Any]:
    """config.json of the output: the source's, with a new quantization_config, and the class that servers look up.

    Of the source's section only the keys survive that servers read for any method, and nothing where all is plain. A
    head that is stored is the head.
    """
    passthrough = {key: value for key, value in source.items() if key != "quantization_config"}
    if not passthrough.get("architectures"):
        passthrough["architectures"] = [facts.model_class]
    passthrough |= untied_keys(source, facts)
    if any(action.table and action.spec.dtype == FP8 for action in plan.actions) and facts.model_type in TABLE_DTYPES:
        place = TEXT if isinstance(passthrough.get(TEXT), dict) else None
        key = {TABLE_DTYPES[facts.model_type]: "float8_e4m3fn"}
        passthrough |= {place: passthrough[place] | key} if place else key
    section = source.get("quantization_config")
    own = {key: section[key] for key in facts.section_keys if key in section} if isinstance(section, dict) else {}
    made = quantization_config(facts, plan)
    return passthrough | ({"quantization_config": made | own} if made["config_groups"] else {})


def untied_keys(config: Mapping[str, Any], facts: Architecture) -> dict[str, Any]:
    """The keys about tied embeddings that an output has otherwise than its source's config.json, see `untied`."""
    if facts.head == facts.embedding:
        return {}
    return untied(config, model_class(facts.model_class, f"the facts of {facts.model_type}: model_class"))


def remarks_on_config(source: Checkpoint, facts: Architecture, *, measured: bool = True) -> list[str]:
    """Sentences about keys of a source's config.json that its files contradict: tied embeddings, dtype, FP8.

    Where an output is `measured` against it, also about experts that it has in few bits.
    """
    remarks, config = list[str](), source.config
    if untied_keys(config, facts):
        remarks.append(
            f"config.json says or means {TIED}: true, but the files hold {facts.head}: the model is computed with that "
            f"head, and an output says {TIED}: false, so that every server does the same"
        )
    dtypes = dtypes_of(config)
    if len(set(dtypes.values())) > 1:
        given = " and ".join(f"{key}: {value}" for key, value in dtypes.items())
        remarks.append(f"config.json says {given}: transformers 5 reads the first, older ones the second")
    stored = TORCH_DTYPES.get(source.tensors[facts.embedding].dtype)
    meant = next(iter(dtypes.values()), stored)
    if stored and meant != stored and "float16" in (meant, stored):  # with another range than the others have
        remarks.append(
            f"config.json says dtype: {meant}, but {facts.embedding} is stored in {stored}: servers compute in {meant} "
            f"unless they are told --dtype {stored}, and what was measured here is another dtype"
        )
    section = config.get("quantization_config") or {}
    stated = "fp8" in str(section.get("quant_method"))
    if stated != any(info.dtype == FP8 for info in source.tensors.values()) and (stated or not section):
        what = "says fp8, but no tensor is" if stated else "is missing, but tensors are FP8"
        remarks.append(f"config.json's quantization_config {what}: each tensor is read as its header says")
    if not measured:
        return remarks
    first = facts.expert(facts.moe_layers[0], 0, "down")
    parts = {name: info for name, info in source.tensors.items() if name.startswith(f"{first}.")}
    forms = [matrix.form for matrix in quantized_matrices(parts, config, source.name).values()]
    if few := [form for form in forms if form.weight_bits <= FEW_BITS]:
        remarks.append(
            f"the source's experts are {few[0]} already: perplexity, KL and all other differences are from these, not "
            "from the weights that they were made of"
        )
    return remarks


def quantization_config(facts: Architecture, plan: Plan) -> dict[str, Any]:
    """The whole section, which replaces the source's."""
    targets, of_forms = targets_of(plan, facts)
    mtp_experts: list[str] = []
    if plan.mtp:  # under the name of every server
        mtp_experts.append(rf".*\.{_list_of_layers(facts)}\.{_one_of(plan.mtp)}\..*{targets.experts}")
        prefixes = dict.fromkeys(server.mtp_prefix for server in facts.servers.values())
        mtp_experts += [rf".*{re.escape(prefix)}.*{targets.experts}" for prefix in prefixes if prefix is not None]
    if plan.mtp_form:
        of_forms[plan.mtp_form] = [*of_forms.get(plan.mtp_form, []), *mtp_experts]
    routed = _routed_groups(facts, plan, targets)
    attention = dict[str, Any]()
    for form, patterns in of_forms.items():  # several may differ in nothing that a group says: in the scales' dtype
        group = attention.setdefault(f"attention_{form.group_name}", _group([], form))
        group["targets"] += _group(patterns, form)["targets"]
    plain = [] if plan.mtp_form else [f"re:{pattern}" for pattern in mtp_experts]
    if any(isinstance(form, Plain) for form in plan.expert_forms.values()):
        plain.append(f"re:{_routed_pattern(facts, plan, targets)}")
    experts_first = any("experts" in pattern for patterns in of_forms.values() for pattern in patterns)
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        # The experts' is accepted by vLLM and transformers, and SGLang demands it.
        "format": next((group["format"] for group in (*routed.values(), *attention.values())), "pack-quantized"),
        "config_groups": routed | attention if experts_first else attention | routed,
        "ignore": [*targets.ignore, *plain, *([] if plan.linear_forms else targets.unquantized)],
        "kv_cache_scheme": arguments(8, "float", "tensor") if plan.cached else None,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.17.0",
    }


def _routed_groups(facts: Architecture, plan: Plan, targets: Targets) -> dict[str, Any]:
    """One config group per format of the routed experts, by name; its regex lists its layers if there are several."""
    forms, groups = plan.expert_forms, {}
    schemes = [form for form in dict.fromkeys(forms.values()) if isinstance(form, QuantizedFormat)]
    for scheme in schemes:
        name, pattern = "routed_experts", _routed_pattern(facts, plan, targets)
        if len(schemes) > 1:
            name = f"routed_experts_{scheme.group_name}"
            pattern = _routed_pattern(facts, plan, targets, [n for n, form in forms.items() if form == scheme])
        groups[name] = _group([pattern], scheme)
    return groups


def _routed_pattern(facts: Architecture, plan: Plan, targets: Targets, layers: Collection[int] = ()) -> str:
    """Regular expression of the routed experts in some layers, by default in all but those of MTP."""
    within = ""
    if layers:
        within = rf"\.{_list_of_layers(facts)}\.{_one_of(layers)}\..*"
    elif plan.mtp:
        within = rf"\.{_list_of_layers(facts)}\.(?!{_one_of(plan.mtp)}\.)\d+\..*"
    return f"{_beside_carried(plan, facts)}.*{within}{targets.experts}"


def _group(patterns: Iterable[str], form: QuantizedFormat) -> dict[str, Any]:
    return {"targets": [f"re:{pattern}" for pattern in patterns]} | form.config_group()


# Targets -----------------------------------------------------------------------------------------------------------


def targets_of(plan: Plan, facts: Architecture) -> tuple[Targets, dict[QuantizedFormat, list[str]]]:
    """The targets of an output: those that the facts give, or else made from the plan's names.

    Returns:
        The targets, and the expressions for the modules besides routed experts in each quantized format.
    """
    if facts.targets is not None and len(plan.linear_forms) < 2:
        ignore = [
            *facts.targets.ignore,
            *_mtp_beside(plan, facts, facts.targets),
            *_plain_among_quantized(plan, facts, facts.targets),
        ]
        fp8 = [*facts.targets.fp8, *_quantized_beside(plan, facts, facts.targets)]
        targets = facts.targets.model_copy(update={"ignore": ignore, "fp8": fp8})
        return targets, {form: list(fp8) for form in plan.linear_forms}
    schemes = _schemes(plan, facts)
    schemes |= _fused(schemes)
    for layer in plan.expert_forms:  # the first expert stands for all
        prefix = facts.layer(layer, facts.expert_prefix.format(expert=0))
        schemes |= {prefix + name: "experts" for name in _spellings(facts)}
    made = _expressions(schemes, plan, facts)
    targets = Targets(
        fp8=[],
        experts=_end_of_experts(facts),
        ignore=[f"re:{expression}" for expression in made[PLAIN]],
        unquantized=[],
        keys=facts.section_keys,
    )
    return targets, {group: expressions for group, expressions in made.items() if isinstance(group, QuantizedFormat)}


def _plain_among_quantized(plan: Plan, facts: Architecture, targets: Targets) -> list[str]:
    """Expressions for modules that are plain in some layers where others are quantized, and for what they fuse to."""
    kept = [a for a in plan.actions if a.is_other_matrix and a.layer is not None]
    if not any(action.quantized for action in kept):
        return []
    schemes: dict[str, Group] = {_module(a): PLAIN for a in kept if not a.quantized}
    layers: dict[str, list[int]] = {}
    for name in [*schemes, *_fused(schemes)]:
        layer = _layer(name, facts)
        if layer is not None and any(re.match(pattern, name) for pattern in targets.fp8):
            layers.setdefault(re.escape(name.removeprefix(facts.layer(layer, ""))), []).append(layer)
    return [rf"re:.*\.{_list_of_layers(facts)}\.{_one_of(numbers)}\.{end}$" for end, numbers in layers.items()]


def _mtp_beside(plan: Plan, facts: Architecture, targets: Targets) -> list[str]:
    """Expressions for matrices of MTP layers, outside linear modules, that the facts' `ignore` does not match."""
    names = {
        n: facts.layer(at, n) for at in plan.mtp for n, t in facts.of_layer(at).tensors.items() if len(t.shape) > 1
    }
    patterns = [pattern.removeprefix("re:") for pattern in targets.ignore if pattern.startswith("re:")]
    others = (n for n, full in names.items() if not any(re.match(pattern, _parent(full)) for pattern in patterns))
    return [rf"re:.*\.{re.escape(_parent(name))}$" for name in others]


def _quantized_beside(plan: Plan, facts: Architecture, targets: Targets) -> list[str]:
    """Expressions for quantized modules of layers that the facts' targets do not match: models differ in them."""
    kept = {_module(a): a.layer for a in plan.actions if a.is_other_matrix and a.quantized and a.layer is not None}
    others = [(n, layer) for n, layer in kept.items() if not any(re.match(pattern, n) for pattern in targets.fp8)]
    ends = (re.escape(name.removeprefix(facts.layer(layer, ""))) for name, layer in others)
    return [rf".*\.{end}$" for end in dict.fromkeys(ends)]


def _one_of(expressions: Iterable[object]) -> str:
    return f"({'|'.join(map(str, expressions))})"


def _not_below(roots: Collection[str]) -> str:
    """Negative lookahead that keeps an expression from matching modules below these names."""
    return rf"(?!{ANYWHERE}{_one_of(roots)}\.)" if roots else ""


def _list_of_layers(facts: Architecture) -> str:
    """The name of the list of layers, which is before a layer's number: `layers` for the most part."""
    return re.escape(facts.layer_prefix.partition(".{layer}")[0].rpartition(".")[2])


def _beside_carried(plan: Plan, facts: Architecture) -> str:
    """Prefix of the routed experts' expression that excludes quantized experts carried along under other names."""
    names = (_module(action) for action in plan.actions if action.kind == "carry" and action.quantized)
    return _not_below(dict.fromkeys(_place(name, plan, facts)[0] for name in names if _is_expert(name, facts)))


def _spellings(facts: Architecture) -> list[str]:
    """The names of an expert's matrices, as published and as every server knows them."""
    names = [*(linear.name for linear in facts.expert_linears.values()), *PROJECTIONS.values()]
    return list(dict.fromkeys(names if "gate" in facts.expert_linears else [*names, NO_MATRIX]))


def _end_of_experts(facts: Architecture) -> str:
    parent = facts.expert_prefix.partition(".{expert}")[0].rpartition(".")[2]
    return rf"\.{re.escape(parent)}\.\d+\.{_one_of(map(re.escape, _spellings(facts)))}$"


def _is_expert(module: str, facts: Architecture) -> bool:
    return re.search(_end_of_experts(facts), module) is not None


def _schemes(plan: Plan, facts: Architecture) -> dict[str, Group]:
    """The scheme of every module besides the routed experts and those of MTP layers, by its published name."""
    schemes: dict[str, Group] = {}
    for action in plan.actions:
        if action.is_scale or action.expert is not None or len(action.shape) < 2:
            continue
        module = _module(action)
        if action.layer is not None and f"{module}." == facts.layer(action.layer, ""):
            continue  # a parameter of the layer itself, which is no module's weight
        parent, _, last = module.rpartition(".")
        names = [last]
        if _is_expert(f"{parent}.{last}", facts):  # carried along: the first one stands for all
            names = _spellings(facts) if parent.endswith(".0") else []
        for name in names:
            schemes[f"{parent}.{name}".strip(".")] = action.quantized or PLAIN
    return schemes


def _module(action: Action) -> str:
    """The module of an action's tensor."""
    return action.module or _parent(action.source)


def _parent(tensor: str) -> str:
    """The module of a tensor; of a stack of several modules' weights, which has no suffix, that of the stack."""
    return tensor.rpartition(".")[0]


def _fused(schemes: Mapping[str, Group]) -> dict[str, Group]:
    """Modules that servers fuse from several of one scheme; keys are the fused names."""
    made: dict[str, Group] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in schemes):
        for whole, parts in FUSED_IN_SOME.items():
            first, *others = {schemes.get(f"{parent}.{module}") for module in parts}
            if first is not None and not others:
                made[f"{parent}.{whole}"] = first
    return made


def _place(module: str, plan: Plan, facts: Architecture) -> tuple[str, str]:
    """Expressions for the name below which a module lies, empty in a layer, and for the rest of its name."""
    layer = _layer(module, facts)
    if layer in plan.parts and layer is not None:
        return "", _any_number(module.removeprefix(facts.layer(layer, "")))
    names, above = module.split("."), {"model", *facts.layer_prefix.partition(".{layer}")[0].split(".")}
    first = next((index for index, name in enumerate(names) if name not in above), len(names) - 1)
    start = first - 1 if first and names[first].isdecimal() else first  # of a list, one of its members
    return r"\.".join(map(re.escape, names[start : first + 1])), _any_number(".".join(names[first + 1 :]))


def _layer(module: str, facts: Architecture) -> int | None:
    numbers = (int(name) for name in module.split(".") if name.isdecimal())
    return next((number for number in numbers if module.startswith(facts.layer(number, ""))), None)


def _any_number(name: str) -> str:
    return r"\.".join(r"\d+" if word.isdecimal() else re.escape(word) for word in name.split("."))


def _expressions(schemes: Mapping[str, Group], plan: Plan, facts: Architecture) -> dict[Group, list[str]]:
    """The expressions for every module but the experts, by scheme."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name in schemes:
        kinds.setdefault(_place(name, plan, facts), []).append(name)
    roots = list(dict.fromkeys(root for root, _ in kinds if root))
    forms = list(dict.fromkeys(scheme for scheme in schemes.values() if isinstance(scheme, QuantizedFormat)))
    quantized = {root for (root, _), names in kinds.items() for name in names if schemes[name] in forms}
    made: dict[Group, list[str]] = {form: [] for form in forms}
    made[PLAIN] = []
    for (root, end), names in kinds.items():
        for scheme, done in made.items():
            own = [name for name in names if schemes[name] == scheme]
            if all(any(re.match(text, name) for text in done) for name in own):
                continue
            if not root:
                candidates = list(_in_layers(end, [_layer(name, facts) for name in own], roots, facts))
            else:
                candidates = [rf"{ANYWHERE}{root}\..*"] if end and root not in quantized else []
                candidates.append(rf"{ANYWHERE}{root}\.{end}$" if end else f"{ANYWHERE}{root}$")
            in_full = f"{_one_of(map(re.escape, own))}$"
            others = [name for name, other in schemes.items() if other != scheme]
            fitting = (text for text in (*candidates, in_full) if not any(map(re.compile(text).match, others)))
            done.append(next(fitting))
    return made


def _in_layers(end: str, layers: Iterable[int | None], roots: Sequence[str], facts: Architecture) -> Iterator[str]:
    """Expressions for modules in these layers, from the widest to the narrowest."""
    dot = r"\."
    parts, beside = end.split(dot), _not_below(roots)
    yield from (f"{ANYWHERE}{dot.join(parts[-length:])}$" for length in range(1, len(parts) + 1))
    yield f"{beside}{ANYWHERE}{end}$"
    numbered = rf"{ANYWHERE}{_list_of_layers(facts)}\.{_one_of(layers)}\.{end}$"
    yield from (numbered, f"{beside}{numbered}")
