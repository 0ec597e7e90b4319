"""Regular expressions for quantization_config, made from the names of all modules of a plan.

For a model type whose servers are not known here, so that nobody wrote its `targets`. A server looks a module up under
its own name for it: often with another prefix, with other modules fused into it, or below another parent. So each
expression is the shortest end of a name that matches modules of one scheme only: no module of another scheme, nor what
servers fuse such modules to. Three kinds of names are told apart:

    decoder layers      the end of the name; with the layers' numbers where a module is FP8 in some of them only
    routed experts      by number, under the published names of their matrices and under those of every server
    everything else     below one name, such as a vision tower: that name if all of it is plain, else as for layers
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import Targets
from quantizers.architectures.fused import FUSED_IN_SOME
from quantizers.architectures.matrices import PROJECTIONS
from quantizers.checkpoint.safetensors_header import FP8
from quantizers.planning.plan import Plan

Scheme = Literal["fp8", "plain", "experts"]
ANYWHERE = r"(.*\.)?"


class _Place(NamedTuple):
    """Where a module lies: in a decoder layer, or below a name outside of them (`root`); and the rest of its name.

    Both are expressions: `root` is empty in a layer, and in `end` any number stands for a number.
    """

    root: str
    end: str


def targets_of(plan: Plan, facts: Architecture) -> Targets:
    """The targets of an output: those that the facts give, or else made from the plan's names."""
    if facts.targets is not None:
        plain = _plain_among_fp8(plan, facts, facts.targets)
        return facts.targets.model_copy(update={"ignore": [*facts.targets.ignore, *plain]}) if plain else facts.targets
    schemes = _schemes(plan, facts)
    schemes |= _fused(schemes) | dict.fromkeys(_routed(plan, facts), "experts")
    kinds: dict[_Place, list[str]] = {}
    for name in schemes:
        kinds.setdefault(_place(name, plan, facts), []).append(name)
    made = _expressions(kinds, schemes, facts)
    return Targets(
        fp8=[expression for scheme, expression in made if scheme == "fp8"],
        experts=_end_of_experts(facts),
        ignore=[f"re:{expression}" for scheme, expression in made if scheme == "plain"],
        unquantized=[],
        keys=facts.section_keys,
    )


def _plain_among_fp8(plan: Plan, facts: Architecture, targets: Targets) -> list[str]:
    """Expressions for modules that a source of FP8 keeps in another dtype in some layers, and for what they fuse to."""
    kept = [a for a in plan.actions if a.is_passthrough_matrix and a.layer is not None]
    if not any(action.spec.dtype == FP8 for action in kept):
        return []
    schemes: dict[str, Scheme] = {_module(a.source): "plain" for a in kept if a.spec.dtype != FP8}
    layers: dict[str, list[str]] = {}
    for name in [*schemes, *_fused(schemes)]:
        layer = _layer(name, facts)
        if layer is not None and any(re.match(pattern, name) for pattern in targets.fp8):
            layers.setdefault(re.escape(name.removeprefix(facts.layer(layer, ""))), []).append(str(layer))
    return [rf"re:.*\.{list_of_layers(facts)}\.({'|'.join(numbers)})\.{end}$" for end, numbers in layers.items()]


def list_of_layers(facts: Architecture) -> str:
    """The name of the list of layers, which is before a layer's number: `layers` for the most part."""
    return re.escape(facts.layer_prefix.partition(".{layer}")[0].rpartition(".")[2])


def beside_routed(plan: Plan, facts: Architecture) -> str:
    """What the routed experts' expression begins with, where FP8 experts are carried along under other names."""
    carried = (action for action in plan.actions if action.kind == "carry" and action.spec.dtype == FP8)
    names = (_module(action.source) for action in carried)
    roots = dict.fromkeys(_place(name, plan, facts).root for name in names if _is_expert(name, facts))
    return rf"(?!{ANYWHERE}({'|'.join(roots)})\.)" if roots else ""


def _spellings(facts: Architecture) -> list[str]:
    """The names of an expert's matrices, as published and as every server knows them."""
    return list(dict.fromkeys([*(one.name for one in facts.expert_linears.values()), *PROJECTIONS.values()]))


def _end_of_experts(facts: Architecture) -> str:
    parent = facts.expert_prefix.partition(".{expert}")[0].rpartition(".")[2]
    return rf"\.{re.escape(parent)}\.\d+\.({'|'.join(map(re.escape, _spellings(facts)))})$"


def _is_expert(module: str, facts: Architecture) -> bool:
    return re.search(_end_of_experts(facts), module) is not None


def _routed(plan: Plan, facts: Architecture) -> Iterator[str]:
    """The names of the first expert's matrices in every layer, in all spellings."""
    for layer in plan.quantized_layers:
        prefix = facts.layer(layer, facts.expert_prefix.format(expert=0))
        yield from (prefix + name for name in _spellings(facts))


def _schemes(plan: Plan, facts: Architecture) -> dict[str, Scheme]:
    """The scheme of every module besides the routed experts and those of MTP layers, by its published name."""
    schemes: dict[str, Scheme] = {}
    for action in plan.actions:
        if action.is_scale or action.expert is not None or len(action.spec.shape) < 2:
            continue
        parent, _, last = _module(action.source).rpartition(".")
        names = [last]
        if _is_expert(f"{parent}.{last}", facts):  # carried along: the first one stands for all
            names = _spellings(facts) if parent.endswith(".0") else []
        for name in names:
            schemes[f"{parent}.{name}".strip(".")] = "fp8" if action.spec.dtype == FP8 else "plain"
    return schemes


def _module(tensor: str) -> str:
    """The module of a weight; for a stack of several modules' weights, which has no suffix, that of the stack."""
    return tensor.removesuffix(".weight") if tensor.endswith(".weight") else tensor.rpartition(".")[0]


def _fused(schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """What servers make of several modules of one scheme, by its name."""
    made: dict[str, Scheme] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in schemes):
        for whole, parts in FUSED_IN_SOME.items():
            found = {schemes.get(f"{parent}.{part}") for part in parts}
            scheme = found.pop()
            if scheme is not None and not found:
                made[f"{parent}.{whole}"] = scheme
    return made


def _place(module: str, plan: Plan, facts: Architecture) -> _Place:
    """Where a module lies, by its name."""
    layer = _layer(module, facts)
    if layer in plan.parts and layer is not None:
        return _Place("", _any_number(module.removeprefix(facts.layer(layer, ""))))
    parts, above = module.split("."), {"model", *facts.layer_prefix.partition(".{layer}")[0].split(".")}
    first = next((index for index, part in enumerate(parts) if part not in above), len(parts) - 1)
    start = first - 1 if first and parts[first].isdecimal() else first  # of a list, one of its members
    return _Place(r"\.".join(map(re.escape, parts[start : first + 1])), _any_number(".".join(parts[first + 1 :])))


def _layer(module: str, facts: Architecture) -> int | None:
    numbers = (int(part) for part in module.split(".") if part.isdecimal())
    return next((number for number in numbers if module.startswith(facts.layer(number, ""))), None)


def _any_number(name: str) -> str:
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))


def _expressions(
    kinds: Mapping[_Place, Collection[str]], schemes: Mapping[str, Scheme], facts: Architecture
) -> list[tuple[Scheme, str]]:
    """The expressions for every module but the experts, each with its scheme."""
    roots = list(dict.fromkeys(place.root for place in kinds if place.root))
    in_fp8 = {place.root for place, names in kinds.items() for name in names if schemes[name] == "fp8"}
    made: list[tuple[Scheme, str]] = []
    for place, names in kinds.items():
        for scheme in dict.fromkeys(schemes[name] for name in names):
            own = [name for name in names if schemes[name] == scheme]
            candidates = (
                _below(place, all_plain=place.root not in in_fp8)
                if place.root
                else _in_layers(place.end, [_layer(name, facts) for name in own], roots, facts)
            )
            done = [re.compile(text) for other, text in made if other == scheme]
            if scheme == "experts" or all(any(text.match(name) for text in done) for name in own):
                continue
            others = [name for name, other in schemes.items() if other != scheme]
            made.append((scheme, _shortest([*candidates, f"({'|'.join(map(re.escape, own))})$"], others)))
    return made


def _below(place: _Place, all_plain: bool) -> Iterator[str]:
    """Expressions for modules outside the layers, from the widest to the narrowest."""
    if all_plain and place.end:
        yield rf"{ANYWHERE}{place.root}\..*"
    yield rf"{ANYWHERE}{place.root}\.{place.end}$" if place.end else f"{ANYWHERE}{place.root}$"


def _in_layers(end: str, layers: Iterable[int | None], roots: Sequence[str], facts: Architecture) -> Iterator[str]:
    """Expressions for modules in these layers, from the widest to the narrowest."""
    dot = r"\."
    parts, numbers = end.split(dot), "|".join(map(str, layers))
    beside = [rf"(?!{ANYWHERE}({'|'.join(roots)})\.)"] if roots else []
    ends = [dot.join(parts[-length:]) for length in range(1, len(parts) + 1)]
    yield from (f"{ANYWHERE}{some}$" for some in ends)
    yield from (f"{start}{ANYWHERE}{end}$" for start in beside)
    yield from (rf"{start}{ANYWHERE}{list_of_layers(facts)}\.({numbers})\.{end}$" for start in ("", *beside))


def _shortest(candidates: Iterable[str], others: Collection[str]) -> str:
    """The first expression that matches none of the other modules; the last one names its own in full."""
    return next(text for text in candidates if not any(map(re.compile(text).match, others)))
