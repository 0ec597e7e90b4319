"""An action for every tensor of a checkpoint, from the architecture spec of its family and the headers.

An unknown tensor is refused: it might read the norm into which scales are folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from quantizers.architectures.architecture import Architecture, TensorFacts
from quantizers.architectures.fused import FUSED_IN_SOME, fits_fp8
from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TORCH_DTYPES, Spec
from quantizers.formats.conversion import CONVERSIONS
from quantizers.formats.format import SCALE, ExpertFormat
from quantizers.formats.fp8 import (
    ROWS,
    SCALE_INV,
    Fp8,
    declared_form,
    declared_scale,
    stored_form,
    unreadable_scale,
)
from quantizers.formats.packed_integers import GROUPS
from quantizers.recipe.schema import Attention, Experts
from quantizers.system.errors import ArchitectureError, CheckpointError, RecipeError

from .plan import Action, Kind, Plan

LATENT = ("kv_a_proj_with_mqa", "kv_b_proj")  # linear modules of latent attention
SERVED_NAME = "self_attn"
Remaining = dict[str, Spec]  # tensors without an action so far


class _Module(NamedTuple):
    """A tensor with its facts, or a linear module, whose name lacks `.weight` and which may have a scale."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    facts: TensorFacts | None = None
    expert: int | None = None
    matrix: Matrix | None = None


def _modules(facts: Architecture, mtp: Iterable[int]) -> Iterator[_Module]:
    """Everything that a checkpoint of these facts has, layer by layer, `mtp` last, then outside the layers."""
    shapes = {matrix: facts.expert_linears[matrix].shape for matrix in MATRICES}
    for layer in (*range(facts.num_layers), *mtp):
        here = facts.of_layer(layer)
        for name, tensor in here.tensors.items():
            full = facts.layer(layer, name)
            yield _Module(full, tensor.shape, facts.table_parts.get(full, layer), tensor)
        for name, shape in here.linears.items():
            yield _Module(facts.layer(layer, name), shape, layer)
        for expert in range(0 if here.dense else facts.num_experts):
            for matrix in MATRICES:
                yield _Module(facts.expert(layer, expert, matrix), shapes[matrix], layer, None, expert, matrix)
    for name, tensor in facts.outside.items():
        yield _Module(name, tensor.shape, None, tensor)


def expected_tensors(facts: Architecture, config: Mapping[str, Any], where: str) -> dict[str, Spec]:
    """Every tensor of a checkpoint as the family publishes it, for planning without the files.

    Linear modules are FP8 if config.json's quantization_config says so, else bfloat16. `where` is its path.

    Raises:
        CheckpointError: quantization_config declares a form of weights that cannot be read.
    """
    form = declared_form(config, where) if config.get("quantization_config") else None
    scale = declared_scale(config)

    @cache
    def linear(shape: tuple[int, ...]) -> list[tuple[str, Spec]]:
        if not form:
            return [("weight", Spec("BF16", shape))]
        return [("weight", Spec(FP8, shape)), (scale, Spec(facts.scale_dtype, form.scale_shape(shape)))]

    tensors: dict[str, Spec] = {}
    for module in _modules(facts, facts.mtp_layers):
        if module.facts is not None:
            tensors[module.name] = Spec(module.facts.dtype, module.shape)
            continue
        for last, spec in linear(module.shape):
            tensors[f"{module.name}.{last}"] = spec
    return tensors


def make_plan(
    facts: Architecture,
    tensors: Mapping[str, Spec],
    experts: Experts,
    where: str,
    block: tuple[int, int],
    attention: Attention = "keep",
    *,
    kv_cache: bool = False,
) -> Plan:
    """The plan of a source named `where`.

    Args:
        tensors: the source's headers, or `expected_tensors`.
        block: rows and columns of an FP8 block, where FP8 weights have a scale per block.
        attention: what becomes of linear modules that are no routed experts.
        kv_cache: whether there are scales for an FP8 cache of keys and values.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or dtype, or there are both forms of FP8.
        ArchitectureError: the facts name a tensor, and call it unread as well.
        RecipeError: the group size does not divide the experts' matrices, the recipe asks for a fold that is not exact,
            or for a conversion that this source does not need or that servers do not take.
    """
    scheme = experts.scheme
    require_group(scheme, {facts.sizes[key].key: facts.sizes[key].value for key in ("hidden", "width")}, where)
    folded = folds(facts, experts, where)
    in_layers, _, _ = facts.layer_prefix.partition("{layer}")
    within = {n: t for n, t in tensors.items() if n.startswith(in_layers) and not facts.is_unread(n)}
    form = stored_form(within, block)
    # Copies of a model may lack its MTP layers.
    mtp = [layer for layer in facts.mtp_layers if any(name.startswith(facts.layer(layer, "")) for name in tensors)]
    remaining, folding = dict(tensors), set(facts.moe_layers if folded else ())
    actions: list[Action] = []
    tables = ((n, table) for n in range(facts.num_layers) for table in facts.tables(n).values() if table.scale)
    scaled = {facts.layer(number, name) for number, table in tables for name in table.tensors}
    for module in _modules(facts, mtp):
        if module.facts is None:
            actions += _linear_actions(remaining, module, scheme, form, mtp, attention, where)
        elif module.name in remaining or not module.facts.optional:
            integers = module.facts.dtype not in FLOATING
            dtypes: tuple[str, ...] = (module.facts.dtype,) if integers else FLOATING
            if module.name in scaled:
                dtypes = (*FLOATING, FP8)
            spec = take(remaining, module.name, module.shape, dtypes, where)
            actions.append(_tensor_action(module, spec, facts, fold=module.layer in folding))
    actions += _unread_actions(remaining, actions, facts, facts.num_layers, where)
    if remaining:
        more = f" (and {len(remaining) - 1} more)" if len(remaining) > 1 else ""
        reason = "it might read the folded norm" if folded else "nothing says what it is for"
        raise CheckpointError(
            where,
            f"{next(iter(remaining))}{more} is not among the facts of {facts.model_type}; {reason}, so it is refused",
            "give the published checkpoint",
        )
    last = facts.num_layers + len(facts.mtp_layers) + len(facts.table_parts)
    actions.sort(key=lambda action: last if action.layer is None else action.layer)
    _require_converted(attention, actions, where)
    cached = _cached(facts, where) if kv_cache else {}
    return Plan(tuple(actions), facts.num_layers, experts, (scheme,) * facts.num_layers, attention, tuple(mtp), cached)


def _tensor_action(module: _Module, spec: Spec, facts: Architecture, *, fold: bool) -> Action:
    """The action of a tensor that is no linear module: with `fold` the norm's is changed, and the router's with it."""
    kind: Kind = "keep"
    output = spec
    if fold and module.layer is not None and facts.norm:
        if module.name == facts.layer(module.layer, facts.norm.tensor):
            kind = "fold"
        elif facts.router_follows and module.name == facts.layer(module.layer, facts.router.tensor):
            kind, output = "compensate", Spec(facts.router.served, spec.shape)
    return Action(module.name, spec, kind, {module.name: output}, module.layer, table=module.name in facts.table_parts)


def _linear_actions(
    remaining: Remaining,
    module: _Module,
    scheme: ExpertFormat,
    form: Fp8,
    mtp: Collection[int],
    attention: Attention,
    where: str,
) -> Iterator[Action]:
    """The actions of a linear module: of its weight, and of the scale that an FP8 one has."""
    of, weight = (module.layer, module.expert, module.matrix), f"{module.name}.weight"
    spec = take(remaining, weight, module.shape, (FP8, *FLOATING), where)
    quantized = module.expert is not None and module.layer not in mtp
    made = None if module.expert is not None else CONVERSIONS.get(attention)
    if not (fits_fp8(module.name) if isinstance(made, Fp8) else spec.dtype == FP8):
        made = None  # it has no such form, or has it already
    kind: Kind = "quantize" if quantized else "convert" if made else "keep"
    outputs = {weight: spec}
    if quantized:
        outputs = scheme.specs(module.name, spec.shape)
    elif made:
        outputs = made.specs(module.name, spec.shape)
    yield Action(weight, spec, kind, outputs, *of)
    if spec.dtype != FP8:
        return
    written, other = f"{module.name}.{SCALE}", f"{module.name}.{SCALE_INV}"
    if form == ROWS and other in remaining:
        raise CheckpointError(
            where,
            f"{other} is a scale per block of FP8, but other tensors have a scale per row (weight_scale); one config "
            "group cannot say both",
            "give the published checkpoint",
        )
    scale = written if form == ROWS or written in remaining else other
    if scale in remaining and (known := unreadable_scale(form, remaining[scale], spec.shape)):
        raise CheckpointError(
            where,
            f"{scale} is a scale {known}; of FP8 only F32 or BF16 scales of rows or blocks can be read",
            "give the model's release with such scales, or in BF16",
        )
    scale_spec = take(remaining, scale, form.scale_shape(spec.shape), ("F32", "BF16"), where)
    if kind == "keep":
        yield Action(scale, scale_spec, "keep" if scale == written else "rename", {written: scale_spec}, *of)
    else:
        yield Action(scale, scale_spec, "drop", {}, *of)


def _cached(facts: Architecture, where: str) -> dict[int, str]:
    """The attention modules whose keys and values servers cache, by layer; refused where there are none."""
    latent = [name for name in facts.every_linear() if name.rpartition(".")[2] in LATENT]
    if latent:
        raise RecipeError(
            f"{where}: kv_cache: fp8",
            f"{latent[0]} is of latent attention (MLA), of whose cache servers read no scales",
            "remove the key",
        )
    cached = {n: name for n in range(facts.num_layers) if (name := facts.of_layer(n).cached) is not None}
    other = next((name for name in cached.values() if not name.endswith(SERVED_NAME)), None)
    if not cached or other:
        why = (
            f"servers look for scales in {SERVED_NAME}, not in {other}" if other else "no layer caches keys and values"
        )
        raise RecipeError(f"{where}: kv_cache: fp8", why, "remove the key")
    return {n: facts.layer(n, name) for n, name in cached.items()}


def require_group(scheme: ExpertFormat, sizes: Mapping[str, int], where: str) -> None:
    """Raise a RecipeError unless the groups of a scheme divide all sizes of the experts' matrices, by their names."""
    for name, size in sizes.items():
        if not scheme.fits(size):
            fitting = [group for group in GROUPS if all(other % group == 0 for other in sizes.values())]
            raise RecipeError(
                where,
                f"experts.group_size {scheme.group_size} does not divide {name} {size}",
                f"give experts.group_size: {max(fitting)}"
                if fitting
                else "give another model: no group size divides both",
            )


def _require_converted(attention: Attention, actions: Sequence[Action], where: str) -> None:
    """Refuse a conversion of nothing, of what is FP8 already, or into blocks that servers do not take."""
    made = CONVERSIONS.get(attention)
    if made is None:
        return
    matrices, key = [action for action in actions if action.is_other_matrix], f"{where}: attention: {attention}"
    converted = [action for action in matrices if action.kind == "convert"]
    if not converted:
        is_fp8 = "of attention, shared experts or dense layers is FP8"
        raise RecipeError(key, f"no matrix {'fits' if isinstance(made, Fp8) else is_fp8}", "remove the key")
    if not isinstance(made, Fp8):
        return
    for action in matrices:
        if action.spec.dtype == FP8:
            raise RecipeError(key, f"{action.source} is FP8 already", "remove the key, or give bf16")
    merged = {module for modules in FUSED_IN_SOME.values() for module in modules[:-1]}
    for action in converted:
        rows, columns = action.spec.shape
        last = action.source.removesuffix(".weight").rpartition(".")[2]
        for what, size, edge in (("rows", rows if last in merged else 0, 0), ("columns", columns, 1)):
            if size % made.edges[edge]:
                raise RecipeError(
                    key,
                    f"{action.source} has {size} {what}, not a multiple of {made.edges[edge]}, and servers take no "
                    "such blocks",
                    "give fp8, which has a scale per row",
                )


def _unread_actions(
    remaining: Remaining, actions: Sequence[Action], facts: Architecture, layers: int, where: str
) -> list[Action]:
    """The actions of the tensors that the facts call unread, none of which another action may name."""
    for name in {name for action in actions for name in (action.source, *action.outputs)} if facts.unread else ():
        if facts.is_unread(name):
            raise ArchitectureError(
                where,
                f"{name} matches both a known tensor and `unread` in the architecture spec of {facts.model_type}",
                "make the expression narrower",
            )
    unread = {name: spec.shape for name, spec in remaining.items() if facts.is_unread(name)}
    taken = {name: take(remaining, name, shape, tuple(TORCH_DTYPES), where) for name, shape in unread.items()}
    in_fp8 = {name for name, spec in taken.items() if spec.dtype == FP8}
    layer_of = {facts.layer(layer, ""): layer for layer in range(layers)}
    unread_actions = []
    for name, spec in taken.items():
        module, _, suffix = name.rpartition(".")
        renamed = suffix == SCALE_INV and f"{module}.weight" in in_fp8
        layer = next((number for prefix, number in layer_of.items() if name.startswith(prefix)), None)
        outputs = {f"{module}.{SCALE}" if renamed else name: spec}
        unread_actions.append(Action(name, spec, "rename" if renamed else "carry", outputs, layer))
    return unread_actions


def take(remaining: Remaining, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], where: str) -> Spec:
    """Take a tensor out of `remaining`; CheckpointError if it is missing, or has another shape or dtype."""
    spec = remaining.pop(name, None)
    if spec is None:
        raise CheckpointError(where, f"{name} is missing", "the checkpoint is incomplete, download it again")
    if spec.shape != shape:
        raise CheckpointError(
            where,
            f"{name} has shape {list(spec.shape)}, config.json says {list(shape)}",
            "they do not belong together, download both again",
        )
    if spec.dtype not in dtypes:
        raise CheckpointError(
            where, f"{name} is {spec.dtype}; {' or '.join(dtypes)} is needed", "give the published checkpoint"
        )
    return spec


def obstacle(facts: Architecture, engine: Literal["gram", "llmcompressor"]) -> str | None:
    """Reason why one of the engines cannot fold scales into the norm of a family; None if it can."""
    norm = facts.norm
    if norm is None or facts.against_a_fold or not norm.offset or engine != "llmcompressor":
        return facts.against_a_fold
    return f"llm-compressor divides {norm.tensor} itself, but the model multiplies by {norm.offset} + it"


def folds(facts: Architecture, experts: Experts, where: str) -> bool:
    """Whether these settings fold scales into the norm before the experts.

    Raises:
        RecipeError: they demand it, but the norm has readers that cannot follow; or the engine cannot compute the
            experts.
    """
    if experts.engine == "llmcompressor" and any(kind.own_gate for kind in facts.kinds):
        raise RecipeError(
            f"{where}: experts.engine",
            "llm-compressor does not know the gate that these experts have of their own",
            "take gram",
        )
    if not experts.awq or experts.awq.fold is False:
        return False
    against = obstacle(facts, experts.engine)
    if against and experts.awq.fold:
        raise RecipeError(f"{where}: experts.awq.fold", against, "remove the key, or set it to false")
    return against is None
