"""Assigns an action to every tensor of a checkpoint, from the architecture spec of its family and the headers.

An unknown tensor is refused instead of kept, because it might read the folded norm. Scales are folded into the norm
before the experts only where everything that reads it can follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import TensorFacts
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TORCH_DTYPES, Spec
from quantizers.formats.fp8 import ROWS, SCALE, SCALE_INV, Fp8, declared_form, scale_of, stored_form
from quantizers.recipe.schema import Experts
from quantizers.system.errors import ArchitectureError, CheckpointError, RecipeError

from .plan import Action, Kind, Plan, packed_specs

Remaining = dict[str, Spec]  # tensors without an action so far


def expected_tensors(facts: Architecture, sizes: Sizes, config: Mapping[str, Any], where: str) -> dict[str, Spec]:
    """Every tensor of a checkpoint as the family publishes it, for planning without the files.

    Args:
        config: config.json, whose quantization_config says whether linear modules are FP8; else they are bfloat16.
        where: its path, for messages.

    Raises:
        CheckpointError: quantization_config declares a form of weights that cannot be read.
    """
    form = declared_form(config, where) if config.get("quantization_config") else None
    tensors = {name: Spec(t.dtype, sizes.shape(t.shape)) for name, t in facts.outside.items()}
    shapes = {matrix: sizes.shape(facts.expert_linears[matrix].shape) for matrix in MATRICES}

    @cache
    def specs(shape: tuple[int, ...]) -> list[tuple[str, Spec]]:
        weight = ("weight", Spec(FP8 if form else "BF16", shape))
        if not form:
            return [weight]
        suffix, scale = scale_of(form, shape)
        return [weight, (suffix, Spec(facts.scale_dtype, scale))]

    def linear(name: str, shape: tuple[int, ...]) -> None:
        for suffix, spec in specs(shape):
            tensors[f"{name}.{suffix}"] = spec

    for layer in (*range(sizes["layers"]), *sizes.mtp):
        dense = layer in sizes.dense
        own, linears = _in_layer(facts, sizes, layer)
        for name, t in own.items():
            tensors[facts.layer(layer, name)] = Spec(t.dtype, sizes.shape(t.shape))
        for name, terms in linears.items():
            linear(facts.layer(layer, name), sizes.shape(terms))
        for expert in range(0 if dense else sizes["experts"]):
            for matrix in MATRICES:
                linear(facts.expert(layer, expert, matrix), shapes[matrix])
    return tensors


def _in_layer(facts: Architecture, sizes: Sizes, layer: int) -> tuple[dict[str, TensorFacts], dict[str, list[str]]]:
    """The tensors and linear modules of a layer besides its routed experts."""
    if layer in sizes.mtp:
        return facts.mtp_tensors(), facts.mtp_linears()
    dense = layer in sizes.dense
    return facts.tensors(dense), facts.linears(dense)


def mtp_layers(facts: Architecture, sizes: Sizes, tensors: Mapping[str, Spec]) -> list[int]:
    """The layers that predict further tokens, as far as a checkpoint has them; copies may leave them out."""
    return [layer for layer in sizes.mtp if any(name.startswith(facts.layer(layer, "")) for name in tensors)]


def make_plan(
    facts: Architecture,
    sizes: Sizes,
    tensors: Mapping[str, Spec],
    experts: Experts,
    where: str,
    block: tuple[int, int],
) -> Plan:
    """Assign an action to every tensor.

    Args:
        tensors: the source's headers, or `expected_tensors`.
        where: the source's name, for messages.
        block: rows and columns of an FP8 block, where FP8 weights have a scale per block.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or dtype, or there are both forms of FP8.
        ArchitectureError: the facts name a tensor, and call it unread as well.
        RecipeError: the group size does not divide the experts' matrices, or the recipe asks for a fold that is
            not exact.
    """
    for size in ("hidden", "width"):
        if sizes[size] % experts.group_size:
            raise RecipeError(
                f"{where}: experts.group_size {experts.group_size} does not divide {facts.sizes[size].key} "
                f"{sizes[size]}; choose a smaller group"
            )
    folded = folds(facts, experts, where)
    remaining = dict(tensors)
    actions: list[Action] = []
    shapes = {matrix: sizes.shape(facts.expert_linears[matrix].shape) for matrix in MATRICES}

    in_layers, _, _ = facts.layer_prefix.partition("{layer}")
    form = stored_form((name for name in tensors if name.startswith(in_layers) and not facts.is_unread(name)), block)
    linear = (FP8, *FLOATING)
    mtp = mtp_layers(facts, sizes, tensors)
    for layer in (*range(sizes["layers"]), *mtp):
        dense, read = layer in sizes.dense, layer not in sizes.mtp
        own, linears = _in_layer(facts, sizes, layer)
        for name, t in own.items():
            full_name = facts.layer(layer, name)
            if t.optional and full_name not in remaining:
                continue
            spec = take(remaining, full_name, sizes.shape(t.shape), FLOATING, where)
            kind: Kind = "keep"
            output = spec
            if folded and read and not dense and name == facts.norm.tensor:
                kind = "fold"
            elif folded and read and not dense and name == facts.router.tensor:
                kind, output = "compensate", Spec(facts.router.served, spec.shape)
            actions.append(Action(full_name, spec, kind, {full_name: output}, layer))
        for name, terms in linears.items():
            module = facts.layer(layer, name)
            spec = take(remaining, f"{module}.weight", sizes.shape(terms), linear, where)
            actions += _kept_linear(remaining, Action(f"{module}.weight", spec, "keep", {}, layer), form, where)
        for expert in range(0 if dense else sizes["experts"]):
            for matrix in MATRICES:
                module = facts.expert(layer, expert, matrix)
                spec = take(remaining, f"{module}.weight", shapes[matrix], linear, where)
                if not read:
                    action = Action(f"{module}.weight", spec, "keep", {}, layer, expert, matrix)
                    actions += _kept_linear(remaining, action, form, where)
                    continue
                outputs = packed_specs(module, spec.shape, experts.scheme)
                actions.append(Action(f"{module}.weight", spec, "quantize", outputs, layer, expert, matrix))
                if spec.dtype == FP8:
                    scale, scale_spec = take_scale(remaining, module, spec.shape, form, where)
                    actions.append(Action(scale, scale_spec, "drop", {}, layer, expert, matrix))
    for name, t in facts.outside.items():
        spec = take(remaining, name, sizes.shape(t.shape), FLOATING, where)
        actions.append(Action(name, spec, "keep", {name: spec}))
    named = {name for action in actions for name in (action.source, *action.outputs)}
    for name, spec, number in take_unread(remaining, named, facts, sizes["layers"], where):
        actions.append(Action(name, spec, "carry", {name: spec}, number))
    if remaining:
        more = f" (and {len(remaining) - 1} more)" if len(remaining) > 1 else ""
        reason = "it might read the folded norm" if folded else "nothing says what it is for"
        raise CheckpointError(
            f"{where}: {next(iter(remaining))}{more} is not among the facts of {facts.model_type}; {reason}, so it is "
            "refused; give the published checkpoint"
        )
    last = sizes["layers"] + len(sizes.mtp)
    actions.sort(key=lambda action: last if action.layer is None else action.layer)
    schemes = (experts.scheme,) * sizes["layers"]
    return Plan(tuple(actions), sizes["layers"], experts, schemes, tuple(mtp))


def _kept_linear(remaining: Remaining, weight: Action, form: Fp8, where: str) -> Iterator[Action]:
    """The actions of a linear module that keeps its bytes: of its weight, and of the scale that an FP8 one has.

    Args:
        weight: the action without its outputs.
    """
    yield replace(weight, outputs={weight.source: weight.spec})
    if weight.spec.dtype == FP8:
        module = weight.source.removesuffix(".weight")
        scale, spec = take_scale(remaining, module, weight.spec.shape, form, where)
        written = f"{module}.{SCALE}"
        kind: Kind = "keep" if scale == written else "rename"
        yield replace(weight, source=scale, spec=spec, kind=kind, outputs={written: spec})


def take(remaining: Remaining, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], where: str) -> Spec:
    """Take a tensor out of `remaining`.

    Args:
        dtypes: those that it may have, in safetensors' spelling.
        where: the source's name, for messages.

    Raises:
        CheckpointError: it is missing, or has another shape or dtype.
    """
    spec = remaining.pop(name, None)
    if spec is None:
        raise CheckpointError(f"{where}: {name} is missing; the checkpoint is incomplete, download it again")
    if spec.shape != shape:
        raise CheckpointError(
            f"{where}: {name} has shape {list(spec.shape)}, config.json says {list(shape)}; they do not belong "
            "together, download both again"
        )
    if spec.dtype not in dtypes:
        raise CheckpointError(
            f"{where}: {name} is {spec.dtype}; {' or '.join(dtypes)} is needed; give the published checkpoint"
        )
    return spec


def take_scale(remaining: Remaining, module: str, shape: tuple[int, ...], form: Fp8, where: str) -> tuple[str, Spec]:
    """Take the scale of an FP8 weight.

    Args:
        shape: of the weight, (rows, columns).
        form: of all FP8 weights of the checkpoint.

    Returns:
        The scale's name and spec.

    Raises:
        CheckpointError: as `take`, or the weight has a scale per block in a checkpoint with scales per row.
    """
    suffix, needed = scale_of(form, shape)
    other = f"{module}.{SCALE_INV}"
    if form == ROWS and other in remaining:
        raise CheckpointError(
            f"{where}: {other} is a scale per block of FP8, but other tensors have a scale per row (weight_scale); one "
            "config group cannot say both; give the published checkpoint"
        )
    name = f"{module}.{suffix}"
    return name, take(remaining, name, needed, ("F32", "BF16"), where)


def take_unread(
    remaining: Remaining, named: Iterable[str], facts: Architecture, layers: int, where: str
) -> list[tuple[str, Spec, int | None]]:
    """Take the tensors that the facts call unread.

    Args:
        named: the names that are read or written otherwise.
        layers: how many decoder layers there are.

    Returns:
        The name, spec and decoder layer of each; None for one outside the layers.

    Raises:
        ArchitectureError: the facts call one of `named` unread.
        CheckpointError: a dtype cannot be read.
    """
    for name in named if facts.unread else ():
        if facts.is_unread(name):
            raise ArchitectureError(
                f"{where}: {name} matches both a known tensor and `unread` in the architecture spec of "
                f"{facts.model_type}; make the expression narrower"
            )
    taken = []
    for name in [name for name in remaining if facts.is_unread(name)]:
        spec = take(remaining, name, remaining[name].shape, tuple(TORCH_DTYPES), where)
        taken.append((name, spec, _layer_of(name, facts, layers)))
    return taken


def _layer_of(name: str, facts: Architecture, layers: int) -> int | None:
    start, _, _ = facts.layer_prefix.partition("{layer}")
    number = name.removeprefix(start).partition(".")[0] if name.startswith(start) else ""
    if not number.isdecimal() or int(number) >= layers:  # the MTP layers follow the last one
        return None
    return int(number) if name.startswith(facts.layer(int(number), "")) else None


def obstacle(facts: Architecture, engine: Literal["gram", "llmcompressor"]) -> str | None:
    """Why scales cannot be folded into the norm of a family by one of the engines; None if they can."""
    if facts.also_reads_the_norm:
        others = ", ".join(facts.also_reads_the_norm)
        return f"{facts.norm.tensor} is also read by {others}, which would have to change with it and keeps its bytes"
    if facts.norm.offset and engine == "llmcompressor":
        return (
            f"llm-compressor divides {facts.norm.tensor} itself, but the model multiplies by {facts.norm.offset} + it"
        )
    return None


def folds(facts: Architecture, experts: Experts, where: str) -> bool:
    """Whether these settings fold scales into the norm before the experts.

    Raises:
        RecipeError: they demand it, but the norm has readers that cannot be compensated.
    """
    if not experts.awq or experts.awq.fold is False:
        return False
    against = obstacle(facts, experts.engine)
    if against and experts.awq.fold:
        raise RecipeError(f"{where}: experts.awq.fold: {against}; remove the key, or set it to false")
    return against is None
