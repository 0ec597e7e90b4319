"""The native solver (`engine: gram`): one layer's captured MoE inputs and weights ─► its quantized experts.

The order is that of docs/explanation/method.md: one pass over the routing ─► one over the token chunks, for the
Hessians of x ─► one scale for the norm and all its readers, where it is folded ─► expert batch by expert batch.

With NVFP4 and with 8 bits the scale s between w3 and w2 comes before w3 is rounded: E4M3 scales are too coarse to be
divided and rounded again, and with 8 bits bfloat16's are off by 4 to 39 % of the codes' error. It is searched from what
the source's w1 and w3 give w2, half a percent off, on a part of large sets: with 8 bits a median KL of 4.22e-6 on the
tiny model instead of 4.58e-6.

Every matmul works on one token chunk or one expert batch, see planning/expert_batches.py.

Legend: E experts, c experts of an expert batch, H hidden, I expert width, R rows, C columns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import MATRICES, Matrix, bias_of, matrices_of, split_first
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import to_host
from quantizers.device.timing import phase
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.formats.nvfp4 import global_scale
from quantizers.formats.packed_integers import dequantize, grouped
from quantizers.model.moe_inputs import MoeInputs, MoeInputStore
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.device_memory import Residents
from quantizers.planning.expert_batches import expert_batches, experts_per_batch, tokens_per_chunk
from quantizers.recipe.schema import Experts

from .awq import Weights, divided, fold_hessian, fold_norm, norm_scale, row_step, width_scale
from .damping import damped, damping_lines, least_damping
from .grid import unit
from .hessians import HessianCache, blended_hessian, collect_down_hessian
from .result import LayerResult
from .rounding import gptq, minmax_scales, mse_scales, nearest, refine
from .routing_weights import ExpertBatch, RoutingStatistics, routing_statistics
from .symmetric import row_losses
from .under_routed import under_routed_figures, unrouted_line

SEARCH_TOKENS = 16  # with 8 bits, tokens for each column of w2: with more, s is searched over every n-th chunk only
REPORTED_ROWS = 512  # of a matrix read for the report, see `row_step`
SWEEPS = 2  # of `refine` after GPTQ; a third lowers a layer's loss by 0.5 to 3 % (tiny model, 4 bits), and not KL
SEARCHED = ("norm_search_before", "norm_search_after")


def solve(
    chunks: Sequence[MoeInputs],
    weights: Weights,
    *,
    norm: Tensor | None,
    offset: int = 0,
    router: Tensor | None,
    shape: Sequence[int],
    gate: Gate,
    bias: Tensor | None = None,
    inner: int = 1,
    settings: Experts,
    batch_size: int,
    residents: Residents,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer from its Hessians.

    Args:
        chunks: captured MoE inputs in token chunks, on the device. Read several times, always in order.
        norm: (H,) as stored, in the source's dtype; None if no scale is to be folded into it.
        offset: added to the stored norm by the model, 0 or 1.
        router: (E, H), or with more rows, if it reads the norm; else None.
        shape: E and H.
        inner: the degree n of h in w3's rows, see gates.py: AWQ's scale s between w3 and w2 is s^(1/n) of w3. 0 where
            none passes through the gate.
        bias: (E, 2I), what the model adds to the products of w1 above w3; None for nothing. It keeps its numbers.
        batch_size: experts of an expert batch.
        dist: each process solves its share of the expert batches, which are those of one process, so that not even the
            shape of a matmul differs; all of them get the whole result.

    Returns:
        The solved layer; `error` has the AWQ objective per token before and after the search, the rounding errors on
        the calibration inputs, relative to the output of the matrices that were rounded (with gptq the corrected w2,
        on the inputs that the rounded w1 and w3 give it), and `expert_tokens`, the fewest tokens that an expert saw.

    Raises:
        QuantizeError: the device's memory is too small for one expert batch.
    """
    experts, hidden = shape
    batches = expert_batches(experts, batch_size)
    batches = [batches[i] for i in dist.partition(len(batches))]
    with phase("Hessians"):
        routing = routing_statistics(chunks, experts, settings.routed_weight, hidden, batch_size=batch_size)
    cache = HessianCache(chunks, routing, hidden, residents, batches)
    searched: dict[str, Tensor] = {}
    folded = norm
    smooth = torch.ones(hidden, device=routing.share.device)
    router_weight = None
    if norm is not None and settings.awq:
        with phase("search"):
            scale, searched = norm_scale(weights, cache, settings, batches, dist)
            folded, smooth = fold_norm(norm, scale, offset)
        router_weight = router.float() * smooth if router is not None else None
    within = settings if inner else settings.model_copy(update={"awq": False})
    solve_next = partial(solve_batch, cache, weights, smooth, gate, within, degree=inner, bias=bias)
    results = [cache.within_memory(partial(solve_next, batches[first:])) for first in range(len(batches))]
    # Emptied on the way, so that nothing is in memory twice.
    rows = {name: torch.cat([result.pop(name) for result in results]) for name in list(results[0] if results else ())}
    order = routing.numbers.argsort()  # of each expert, its place among those that were solved
    rows = dist.all_gather(rows, order.device)
    solved = {name: rows.pop(name).index_select(0, order) for name in list(rows)}
    codes, scales, global_scales, input_scales = (
        {matrix: solved.pop(f"{kind}.{matrix}") for matrix in MATRICES if f"{kind}.{matrix}" in solved}
        for kind in ("codes", "scales", "global", "input")
    )
    solved |= {"routed_tokens": routing.routed_tokens[order], "share": routing.share[order]}
    numbers = to_host(solved | searched)  # only now, when all batches are under way
    under_routed = under_routed_figures(numbers["routed_tokens"], numbers["share"], hidden)
    return LayerResult(
        folded,
        smooth,
        router_weight,
        codes,
        scales,
        _errors(numbers, routing.tokens),
        _fallbacks(numbers, routing, settings, scales),
        under_routed if settings.routed_weight else None,
        global_scales,
        input_scales,
    )


def solve_batch(
    cache: HessianCache,
    weights: Weights,
    smooth: Tensor,
    gate: Gate,
    settings: Experts,
    waiting: Sequence[ExpertBatch],
    *,
    degree: int = 1,
    bias: Tensor | None = None,
) -> dict[str, Tensor]:
    """Scale and round the first of the waiting expert batches.

    Returns:
        For each matrix `codes.…` and `scales.…` as in `LayerResult`. For each expert (c,): `damping.gate_up` and
        `damping.down`, see damping.py; losses `…_lost`, and the squares that they are relative to `…_whole`; the
        w2 search's objective `down_search_before` and `…_after`; with NVFP4 the matrices' `global.…`, and
        `input.…` where activations are quantized; rows `seen` and `dropped`, see `DownHessian`; and `…_zero` of each
        matrix, see `_zero_groups`.
    """
    batch, routing = waiting[0], cache.routing
    hessian = cache.take(waiting)
    with phase("dequantize"):
        source, down = weights(routing.experts[slice(*batch)])
    with phase("Hessians"):
        hessian = blended_hessian(hessian, cache.of_all.hessian, routing, batch)
        fold_hessian(hessian, smooth)
    if bias is not None:
        bias = bias[routing.numbers[slice(*batch)]]
    collect = partial(collect_down_hessian, cache.chunks, routing, gate=gate, batch=batch, bias=bias)
    numbers = _zero_groups(source, down, settings.group_size)
    gate_up, down = source * smooth, down.float()
    matrices = matrices_of(source, down)
    # w2's columns are multiplied by s (c, I), and w3's rows divided by it, or by its root.
    s, rows = torch.ones_like(down[:, 0]), None
    # Otherwise w3's stored scales are divided after rounding.
    early = bool(settings.awq) and settings.scheme.coarse_scales
    if early:
        every = max(1, routing.rows // (SEARCH_TOKENS * down.shape[-1]))
        s, searched = width_scale(down, collect(source, every=every), settings)
        numbers |= searched
        rows = torch.cat([torch.ones_like(s)] * (len(matrices) - 2) + [_root(s, degree)], 1).unsqueeze(-1)
        gate_up.div_(rows)
    # gate and up read the same inputs, so they share one factorization.
    with phase("rounding"):
        codes, scales, divisor = _round(gate_up, hessian, settings, "gate_up", numbers, rows)
    # What codes are multiplied by: scales (c, R, n), divided by each matrix's own divisor (c,), if there is one.
    rounded = dequantize(codes, scales if divisor is None else scales.float() / divisor[:, None, None])
    if rows is not None:
        rounded.mul_(rows)
    # One rounding of the weights to the dtype of the forward pass, as a server does it.
    served = rounded if rounded.dtype == source.dtype else torch.empty_like(source)
    inputs = collect(
        torch.div(rounded, smooth, out=served),
        source=source if settings.rounding == "gptq" else None,
        with_largest=settings.scheme.input_scales,
    )
    del rounded, served
    if inputs.changes is not None:
        with phase("rounding"):
            down = corrected(down, inputs.hessian, inputs.changes)
    first_codes, first_scales = (list(split_first(tensor, len(matrices))) for tensor in (codes, scales))
    if settings.awq and not early:
        s, searched = width_scale(down, inputs, settings)
        numbers |= searched
        # w3's codes stay as they are. (Its scales are rounded to bfloat16 once more, by far less than the codes were.)
        first_scales[-1] = divided(first_scales[-1], first_codes[-1], _root(s, degree))
    if settings.awq:
        down.mul_(s.unsqueeze(1))
        fold_hessian(inputs.hessian, s)
    with phase("rounding"):
        down_codes, down_scales, down_divisor = _round(down, inputs.hessian, settings, "down", numbers)
    by_kind = {"codes": [*first_codes, down_codes], "scales": [*first_scales, down_scales]}
    if divisor is not None and down_divisor is not None:
        by_kind["global"] = [*[divisor] * len(first_codes), down_divisor]
    if inputs.largest is not None:
        of_x = global_scale((cache.of_all.largest / smooth).amax()).expand(len(s))
        by_kind["input"] = [*[of_x] * len(first_codes), global_scale((inputs.largest / s).amax(1))]
    for kind, tensors in by_kind.items():
        numbers |= {f"{kind}.{matrix}": tensor for matrix, tensor in zip(matrices, tensors, strict=True)}
    return numbers | {"seen": inputs.seen, "dropped": inputs.dropped}


def _root(s: Tensor, degree: int) -> Tensor:
    return s if degree == 1 else s.pow(1 / degree)


def _round(
    weight: Tensor,
    hessian: Tensor,
    settings: Experts,
    name: str,
    numbers: dict[str, Tensor],
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes int8, scales bfloat16 and their divisor, see grid.py, of (c, R, C) matrices whose inputs have a Hessian.

    The numbers of `solve_batch` under `name` are added to `numbers`. Losses are those of the rows before they were
    divided by `rows` (c, R, 1). The weight is worthless afterwards.
    """
    weight = weight.mT.contiguous().mT  # columns are contiguous from here on
    group = settings.group_size
    grid = settings.scheme.grid
    signed = settings.signed
    divisor = unit(weight, grid)
    if divisor is not None:
        weight.mul_(divisor[:, None, None])
    if settings.scales == "mse":
        scale = mse_scales(weight, hessian.diagonal(dim1=-2, dim2=-1), group, grid, signed=signed)
    else:
        scale = minmax_scales(weight, group, grid, signed=signed)
    if settings.rounding == "gptq":
        codes, damping = gptq(weight, hessian, scale, grid)
        numbers[f"damping.{name}"] = damping
        solvable = torch.isfinite(damping)[:, None, None]  # the others were rounded to nearest, and stay so
        refined = refine(weight, damped(hessian, damping), codes, scale, grid, signed=signed, sweeps=SWEEPS)
        codes, scale = torch.where(solvable, refined[0], codes), torch.where(solvable, refined[1], scale)
    else:
        codes = nearest(weight, scale, grid)
    step = row_step(weight.shape[1], REPORTED_ROWS)
    whole = weight[:, ::step]
    lost = dequantize(codes[:, ::step], scale[:, ::step]).sub_(whole)
    if rows is not None:
        lost, whole = lost.mul_(rows[:, ::step]), whole * rows[:, ::step]
    for what, rows_of_it in (("lost", lost), ("whole", whole)):
        numbers[f"{name}_{what}"] = row_losses(rows_of_it, hessian).sum(-1).double() * step
        if divisor is not None:
            numbers[f"{name}_{what}"] /= divisor.double().square()
    return codes, scale, divisor


def corrected(down: Tensor, hessian: Tensor, changes: Tensor) -> Tensor:
    """w2 corrected for the inputs that the rounded w1 and w3 give it, (c, H, I) float32; w2 where there is no solution.

    Rounding w1 and w3 changes w2's input from h + d to h. What comes closest to w2 (h + d) is a ridge regression,

        w2* = w2 + w2 (Σ d hᵀ) (Σ h hᵀ + λ I)⁻¹,   λ = 1 % of the Hessian's mean diagonal, see damping.py.

    Both sums are (c, I, I) float32, see `DownHessian`.
    """
    lower, info = torch.linalg.cholesky_ex(damped(hessian, least_damping(hessian)))
    step = torch.cholesky_solve((down @ changes).mT, lower).mT
    solved = (info == 0) & torch.isfinite(torch.linalg.vector_norm(step, torch.inf, dim=(-2, -1)))
    return step.masked_fill_(~solved[:, None, None], 0).add_(down)


# The report's figures of a layer. Numbers are in float64 on the CPU: results of `solve_batch` but for codes and scales,
# `routed_tokens` and `share` of `RoutingStatistics`, and SEARCHED.

Numbers = Mapping[str, Tensor]


def _errors(numbers: Numbers, tokens: int) -> dict[str, float]:
    """Means and ratios over all experts, added in the order of their numbers."""
    errors = {name: float(numbers[name]) / max(tokens, 1) for name in SEARCHED if name in numbers}
    errors["expert_tokens"] = float(numbers["seen"].min())
    experts = len(numbers["seen"])
    sums = {key: float(value.sum()) for key, value in numbers.items() if not key.startswith("damping.")}
    errors |= {key: value / experts for key, value in sums.items() if key.startswith("down_search")}
    for name in ("gate_up", "down"):
        whole = sums[f"{name}_whole"]
        errors[f"{name}_rounding"] = math.sqrt(sums[f"{name}_lost"] / whole) if whole > 0 else 0.0
    return errors


def _zero_groups(gate_up: Tensor, down: Tensor, group: int) -> dict[str, Tensor]:
    """For each matrix `…_zero`, (c,) int64: the number of its groups that are all zero."""
    names = matrices_of(gate_up, down)
    matrices = zip(names, (*split_first(gate_up, len(names)), down), strict=True)
    return {f"{matrix}_zero": grouped(weight, group).any(-1).logical_not_().sum((1, 2)) for matrix, weight in matrices}


def _zero_lines(numbers: Numbers, scales: Mapping[Matrix, Tensor]) -> list[str]:
    """A line for every expert's matrix with such groups."""
    return [
        f"expert {expert}: {matrix}: {count:.0f} of {scales[matrix][0].numel()} groups are all zero"
        for matrix in scales
        for expert, count in enumerate(numbers[f"{matrix}_zero"].tolist())
        if count
    ]


def _fallbacks(
    numbers: Numbers, routing: RoutingStatistics, settings: Experts, scales: Mapping[Matrix, Tensor]
) -> list[str]:
    """One line for every expert that did not get the method of the recipe; a smaller share is part of the method."""
    lines = []
    if left := routing.rows - routing.tokens:
        lines.append(f"{left} rows of the block's input left out: not finite, or too large")
    columns = (numbers[name].tolist() for name in ("seen", "dropped", "routed_tokens", "share"))
    for expert, (seen, left_out, count, share) in enumerate(zip(*columns, strict=True)):
        if left_out:
            of_all = f"{left_out:.0f} of {seen + left_out:.0f} rows"
            lines.append(f"expert {expert}: {of_all} not finite or too large, left out of the Hessian")
        if settings.routed_weight and not share:
            lines.append(unrouted_line(expert, count))
    for matrix in ("gate_up", "down"):
        lines += damping_lines(matrix, numbers.get(f"damping.{matrix}", torch.empty(0)).tolist())
    return lines + _zero_lines(numbers, scales)


def router_matrix(layer: torch.nn.Module, facts: Architecture) -> Tensor | None:
    """The router's matrix in transformers' layer, if it must follow a scale that is folded into the norm."""
    return layer.get_parameter(facts.in_transformers(facts.router.tensor)).data if facts.router_follows else None


def solve_layer(
    model: StreamedModel,
    layer: DecoderLayer,
    norm: Tensor | None,
    moe_inputs: MoeInputStore,
    settings: Experts,
    *,
    weights: Weights,
    residents: Residents,
    entering: Sequence[Tensor] = (),
    check: Callable[[], None] = lambda: None,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer from the captured inputs of its experts, with either engine; the other arguments as for `solve`.

    Args:
        layer: with the source's weights, those of its experts only for the llmcompressor engine; left as it is.
        entering: hidden states entering the layer, (T, H) each; the llmcompressor engine runs the layer itself.
        check: called between chunks; may raise to interrupt.
        dist: for gram only.
    """
    modules, norm = model.facts.modules, None if norm is None else norm.to(model.device)
    experts: Any = layer.module.get_submodule(modules.experts)
    kind = model.facts.of_layer(layer.number)
    if settings.engine == "gram":
        router = router_matrix(layer.module, model.facts)
        accelerator, facts = is_accelerator(model.device), model.facts
        return solve(
            moe_inputs.chunks(model.device, tokens_per_chunk(accelerator), check),
            weights,
            norm=norm,
            offset=model.facts.norm.offset if model.facts.norm else 0,
            router=router,
            shape=(facts.num_experts, facts.expert_inputs),
            gate=gate_of(experts, kind.own_gate),
            bias=bias_of(experts, **facts.modules.layout),
            inner=kind.inner,
            settings=settings,
            batch_size=experts_per_batch(accelerator, facts.expert_inputs, facts.expert_width),
            residents=residents,
            dist=dist,
        )
    from .llmcompressor_engine import solve_with_llmcompressor

    solved = solve_with_llmcompressor(
        copy.deepcopy(layer.module),  # the library replaces the experts' module
        [model.inputs(layer, states.unsqueeze(0)) for states in entering],
        settings,
        modules,
        norm,
        compensate_router=model.facts.router_follows,
    )
    zero = _zero_groups(experts.gate_up_proj.data, experts.down_proj.data, settings.group_size)
    solved.fallbacks.extend(_zero_lines(zero, solved.scales))
    return solved
