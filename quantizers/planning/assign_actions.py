"""An action for every tensor of a checkpoint, from the architecture spec of its family and the headers.

An unknown tensor is refused: it might read the norm into which scales are folded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from quantizers.architectures.architecture import Architecture, TensorFacts
from quantizers.architectures.fused import FUSED_IN_SOME, fits_fp8
from quantizers.architectures.matrices import Matrix
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, TORCH_DTYPES, Spec
from quantizers.formats.conversion import CONVERSIONS
from quantizers.formats.declared import declared_forms
from quantizers.formats.e8m0 import DTYPES, E8M0
from quantizers.formats.format import PACKED, SCALE, SCALES, ExpertFormat, QuantizedFormat, RowFormat, StoredMatrix
from quantizers.formats.fp8 import (
    ROWS,
    SCALE_INV,
    Fp8,
    Fp8Blocks,
    stored_form,
    unreadable_scale,
)
from quantizers.formats.lossless import TARGETS
from quantizers.formats.packed_integers import GROUPS
from quantizers.formats.plain import Plain
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


class _Routed(NamedTuple):
    """The fate of routed experts, but for those of MTP layers."""

    kind: Kind
    form: RowFormat


def _modules(facts: Architecture, mtp: Iterable[int]) -> Iterator[_Module]:
    """Everything that a checkpoint of these facts has, layer by layer, `mtp` last, then outside the layers."""
    shapes = {matrix: facts.expert_linears[matrix].shape for matrix in facts.matrices}
    for layer in (*range(facts.num_layers), *mtp):
        here = facts.of_layer(layer)
        for name, tensor in here.tensors.items():
            full = facts.layer(layer, name)
            yield _Module(full, tensor.shape, facts.table_parts.get(full, layer), tensor)
        for name, shape in here.linears.items():
            yield _Module(facts.layer(layer, name), shape, layer)
        for expert in range(0 if here.dense else facts.num_experts):
            for matrix in facts.matrices:
                yield _Module(facts.expert(layer, expert, matrix), shapes[matrix], layer, None, expert, matrix)
    for name, tensor in facts.outside.items():
        yield _Module(name, tensor.shape, None, tensor)


def expected_tensors(facts: Architecture, config: Mapping[str, Any], where: str) -> dict[str, Spec]:
    """Every tensor of a checkpoint as the family publishes it, for planning without the files.

    Linear modules are stored as config.json's quantization_config declares, else in bfloat16. `where` is its path.

    Raises:
        CheckpointError: quantization_config declares a form of weights that cannot be read.
    """
    declared = declared_forms(config, where)
    tensors: dict[str, Spec] = {}
    for module in _modules(facts, facts.mtp_layers):
        if module.facts is not None:
            tensors[module.name] = Spec(module.facts.dtype, module.shape)
            continue
        tensors |= declared.specs(module.name, module.shape, facts.scale_dtype)
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
    matrices: Mapping[str, StoredMatrix] = MappingProxyType({}),
) -> Plan:
    """The plan of a source named `where`.

    Args:
        tensors: the source's headers, or `expected_tensors`.
        block: rows and columns of an FP8 block, where FP8 weights have a scale per block.
        matrices: those of the source's modules that are quantized otherwise, see `quantized_matrices`.
        attention: what becomes of linear modules that are no routed experts.
        kv_cache: whether there are scales for an FP8 cache of keys and values.

    Raises:
        CheckpointError: a tensor is missing, unknown, or has a wrong shape or dtype, or there are both forms of FP8.
        ArchitectureError: the facts name a tensor, and call it unread as well.
        RecipeError: the group size does not divide the experts' matrices, the recipe asks for a fold that is not exact,
            or for a conversion that this source does not need or that servers do not take.
    """
    hidden = facts.sizes.get("latent", facts.sizes["hidden"])
    sizes = {size.key: size.value for size in (hidden, facts.sizes["width"])}
    if experts.convert is None:
        require_group(experts.scheme, sizes, where)
        routed = _Routed("quantize", experts.scheme)
    else:
        _require_edges(experts.convert, sizes, {matrix.form for matrix in matrices.values()}, where)
        routed = _Routed("convert", TARGETS[experts.convert].form)
    folded = experts.convert is None and folds(facts, experts, where)
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
            actions += _linear_actions(remaining, module, routed, (form, matrices), mtp, attention, where)
        elif (matrix := matrices.get(module.name.removesuffix(".weight"))) is not None:
            raise CheckpointError(
                where,
                f"{module.name} is stored as {matrix.form}, which is read of linear modules alone",
                "give the model's release in which it has 16 or 32 bits",
            )
        elif module.name in remaining or not module.facts.optional:
            integers = module.facts.dtype not in FLOATING
            dtypes: tuple[str, ...] = (module.facts.dtype,) if integers else FLOATING
            if module.name in scaled:
                dtypes = (*FLOATING, FP8)
            spec = take(remaining, module.name, module.shape, dtypes, where)
            actions.append(_tensor_action(module, spec, facts, fold=module.layer in folding))
    actions += _unread_actions(remaining, actions, facts, (form, matrices), where)
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
    schemes: tuple[ExpertFormat, ...] = ()
    if experts.convert is None:
        schemes = (experts.scheme,) * facts.num_layers
    elif not any(action.kind == "convert" and action.expert is not None for action in actions):
        raise RecipeError(
            f"{where}: experts.convert: {experts.convert}",
            f"these experts are {routed.form} already",
            "there is nothing to convert: give another format, or remove the key",
        )
    cached = _cached(facts, where) if kv_cache else {}
    return Plan(tuple(actions), facts.num_layers, experts, schemes, attention, tuple(mtp), cached)


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
    of_routed: _Routed,
    stored: tuple[Fp8, Mapping[str, StoredMatrix]],
    mtp: Collection[int],
    attention: Attention,
    where: str,
) -> Iterator[Action]:
    """The actions of a linear module: of its numbers or codes, and of the scales and other parts beside codes."""
    matrix, (numbers, *beside) = _take_matrix(remaining, module, *stored, where)
    routed = module.expert is not None and module.layer not in mtp
    made: RowFormat | None = None if module.expert is not None else CONVERSIONS.get(attention)
    if not (fits_fp8(module.name) if isinstance(made, Fp8) else not isinstance(matrix.form, Plain)):
        made = None  # it has no such form, or has it already
    kind: Kind = "convert" if made else "keep"
    if routed and (of_routed.kind == "quantize" or of_routed.form != matrix.form):
        kind, made = of_routed  # but an expert that has the format already is not converted to it
    written = made or matrix.form
    if kind == "keep" and not isinstance(written, QuantizedFormat | Plain):
        raise CheckpointError(
            where,
            f"{numbers[0]} is stored as {written}, which no config group of compressed-tensors describes",
            "give attention: bf16, or the model's release in FP8 or BF16"
            if module.expert is None
            else "give a checkpoint without layers that predict further tokens (MTP)",
        )
    place = (module.layer, module.expert, module.matrix, module.name)
    outputs = list(written.specs(module.name, matrix.shape).items())
    for number, (name, spec) in enumerate((numbers, *beside)):
        first = matrix if number == 0 else None
        if kind == "keep":
            output, expected = outputs[number]
            same = {spec.dtype, expected.dtype} <= {*DTYPES, "I8"}  # bytes under another dtype: see formats/e8m0.py
            renamed = {output: Spec(expected.dtype, spec.shape) if same else spec}
            yield Action(name, spec, "keep" if name in renamed else "rename", renamed, *place, first, written)
        elif number == 0:
            yield Action(name, spec, kind, written.specs(module.name, matrix.shape), *place, first, written)
        else:
            yield Action(name, spec, "drop", {}, *place)


def _take_matrix(
    remaining: Remaining, module: _Module, form: Fp8, matrices: Mapping[str, StoredMatrix], where: str
) -> tuple[StoredMatrix, list[tuple[str, Spec]]]:
    """A linear module's matrix, and its tensors, the numbers or codes first, which are taken out of `remaining`."""
    matrix = matrices.get(module.name)
    if matrix is not None:
        return matrix, _take_parts(remaining, module, matrix, where)
    weight = f"{module.name}.weight"
    if weight not in remaining and f"{module.name}.{PACKED}" in remaining:
        parts = {name.removeprefix(f"{module.name}."): spec for name, spec in remaining.items()}
        stored = (f"{last} {spec.dtype} {list(spec.shape)}" for last, spec in parts.items() if "." not in last)
        raise CheckpointError(
            where,
            f"{module.name} is packed in a form that is not read in a source: {', '.join(stored)}",
            "give the model's release in FP8, BF16, or symmetric groups that its config.json declares",
        )
    spec = take(remaining, weight, module.shape, (FP8, *FLOATING), where)
    shape = (module.shape[0], module.shape[1])
    if spec.dtype != FP8:
        return StoredMatrix(Plain(spec.dtype), ("weight",), shape), [(weight, spec)]
    written, other = f"{module.name}.{SCALE}", f"{module.name}.{SCALE_INV}"
    names = (f"{module.name}.{last}" for last in SCALES)
    scale = written if form == ROWS else next((name for name in names if name in remaining), other)
    if form == ROWS and other in remaining:
        raise CheckpointError(
            where,
            f"{other} is a scale per block of FP8, but other tensors have a scale per row (weight_scale); one config "
            "group cannot say both",
            "give the published checkpoint",
        )
    if scale in remaining and (known := unreadable_scale(form, remaining[scale], spec.shape)):
        raise CheckpointError(
            where,
            f"{scale} is a scale {known}; of FP8 only scales of rows or blocks can be read",
            "give the model's release with such scales, or in BF16",
        )
    in_bytes = DTYPES if isinstance(form, Fp8Blocks) else ()
    scale_spec = take(remaining, scale, form.scale_shape(spec.shape), ("F32", "BF16", *in_bytes), where)
    if isinstance(form, Fp8Blocks) and scale_spec.dtype in DTYPES:
        form = replace(form, scales=E8M0)
    last = scale.rpartition(".")[2]
    return StoredMatrix(form, ("weight", last), shape), [(weight, spec), (scale, scale_spec)]


def _take_parts(remaining: Remaining, module: _Module, matrix: StoredMatrix, where: str) -> list[tuple[str, Spec]]:
    """Take the tensors of a quantized matrix out of `remaining`; they must be those of its form and of this shape."""
    if matrix.shape != module.shape:
        raise CheckpointError(
            where,
            f"{module.name} is stored as {matrix.form} of shape {list(matrix.shape)}, config.json says "
            f"{list(module.shape)}",
            "they do not belong together, download both again",
        )
    taken = []
    for last, (_, expected) in zip(matrix.parts, matrix.form.parts(matrix.shape), strict=False):
        dtypes = FLOATING if expected.dtype in FLOATING else (expected.dtype, *(E8M0, "I8") * (expected.dtype == "U8"))
        name, shape = f"{module.name}.{last}", expected.shape
        if not shape and name in remaining and remaining[name].shape == (1,):
            shape = (1,)  # ModelOpt's files have one number in either shape
        taken.append((name, take(remaining, name, shape, dtypes, where)))
    return taken


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


def _require_edges(convert: str, sizes: Mapping[str, int], stored: Collection[RowFormat], where: str) -> None:
    """Raise a RecipeError unless blocks or groups of a target divide all sizes of the experts' matrices.

    Targets that something in the source is `stored` in already are no remedy.
    """
    edge = max(TARGETS[convert].form.edges)
    fitting = [n for n, t in TARGETS.items() if not any(size % max(t.form.edges) for size in sizes.values())]
    others = [name for name in fitting if TARGETS[name].form not in stored]
    for name, size in sizes.items():
        if size % edge:
            raise RecipeError(
                f"{where}: experts.convert: {convert}",
                f"{name} {size} is not a multiple of {edge}, and servers take no such blocks",
                f"give experts.convert: {' or '.join(others)}",
            )


def _require_converted(attention: Attention, actions: Sequence[Action], where: str) -> None:
    """Refuse a conversion of nothing, of what is FP8 already, or into blocks that servers do not take."""
    made = CONVERSIONS.get(attention)
    if made is None:
        return
    matrices, key = [action for action in actions if action.is_other_matrix], f"{where}: attention: {attention}"
    converted = [action for action in matrices if action.kind == "convert"]
    if not converted:
        lacking = "of attention, shared experts or dense layers is quantized"
        raise RecipeError(key, f"no matrix {'fits' if isinstance(made, Fp8) else lacking}", "remove the key")
    if not isinstance(made, Fp8):
        return
    for action in matrices:
        if action.stored is not None and not isinstance(action.stored.form, Plain):
            already = "FP8" if isinstance(action.stored.form, Fp8) else str(action.stored.form)
            raise RecipeError(key, f"{action.source} is {already} already", "remove the key, or give bf16")
    merged = {module for modules in FUSED_IN_SOME.values() for module in modules[:-1]}
    for action in converted:
        rows, columns = action.shape
        last = str(action.module).rpartition(".")[2]
        for what, size, edge in (("rows", rows if last in merged else 0, 0), ("columns", columns, 1)):
            if size % made.edges[edge]:
                raise RecipeError(
                    key,
                    f"{action.source} has {size} {what}, not a multiple of {made.edges[edge]}, and servers take no "
                    "such blocks",
                    "give fp8, which has a scale per row",
                )


def _unread_actions(
    remaining: Remaining,
    actions: Sequence[Action],
    facts: Architecture,
    stored: tuple[Fp8, Mapping[str, StoredMatrix]],
    where: str,
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
    form, matrices = stored
    layer_of = {facts.layer(layer, ""): layer for layer in range(facts.num_layers)}
    unread_actions = []
    for name, spec in taken.items():
        module, _, last = name.rpartition(".")
        layer = next((number for prefix, number in layer_of.items() if name.startswith(prefix)), None)
        weight, matrix = taken.get(f"{module}.weight"), matrices.get(module)
        if matrix is not None:
            written = matrix.form if last == matrix.parts[0] else None
            beside = last in matrix.parts[1:]
            served = dict(zip(matrix.parts, (part for part, _ in matrix.form.parts(matrix.shape)), strict=False))
        else:
            written = form if spec.dtype == FP8 else None
            beside = last in SCALES and weight is not None and weight.dtype == FP8
            served = dict.fromkeys(SCALES, SCALE) if beside else {}
        output = f"{module}.{served.get(last, last)}" if module else name
        kind: Kind = "carry" if output == name else "rename"
        of = module if beside else None
        unread_actions.append(Action(name, spec, kind, {output: spec}, layer, module=of, written=written))
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
    if experts.engine == "llmcompressor":
        if any(kind.own_gate for kind in facts.kinds):
            problem = "llm-compressor does not know the gate that these experts have of their own"
            raise RecipeError(f"{where}: experts.engine", problem, "take gram")
        own = {
            "have no gate": "gate" not in facts.expert_linears,
            "are held transposed": facts.modules.transposed,
            "are held with gate and up in turns": facts.modules.interleaved,
            "read states that the router weighs": facts.modules.weighs_inputs,
            "return what they read, some of them": facts.identities > 0,
        }
        if any(own.values()):
            what = " and ".join(words for words, holds in own.items() if holds)
            problem = f"these experts {what}, which is not tried with llm-compressor"
            raise RecipeError(f"{where}: experts.engine", problem, "take gram")
    if not experts.awq or experts.awq.fold is False:
        return False
    against = obstacle(facts, experts.engine)
    if against and experts.awq.fold:
        raise RecipeError(f"{where}: experts.awq.fold", against, "remove the key, or set it to false")
    return against is None
