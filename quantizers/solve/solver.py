"""The native solver (`engine: gram`): one layer's captured MoE inputs and weights ─► its quantized experts.

Order: one pass over the routing ─► one over the token chunks, for the Hessians of x ─► one scale for the norm and all
its readers, where it is folded ─► expert batch by expert batch, see expert_batch.py. The other engine, llm-compressor's
own, is llmcompressor_engine.py.

Every matmul works on one token chunk or one expert batch, see planning/expert_batches.py. Memory decides no byte, see
planning/device_memory.py.

Legend: E experts, c experts of an expert batch, H hidden, I expert width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import to_host
from quantizers.device.timing import phase
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.formats.packed_integers import grouped
from quantizers.model.moe_inputs import MoeInputs, MoeInputStore
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.device_memory import Residents
from quantizers.planning.expert_batches import expert_batches, experts_per_batch, tokens_per_chunk
from quantizers.recipe.schema import Experts

from .awq import fold_hessian, fold_norm, norm_scale
from .down_hessian import DownHessian, collect_down_hessian
from .expert_batch import solve_batch
from .input_hessian import ExpertBatch, HessianCache, blended_hessian
from .result import LayerResult
from .rounding import DAMPING
from .routing_weights import RoutingStatistics, routing_statistics

SEARCH_TOKENS = 16  # with 8 bits, tokens for each column of w2: with more, s is searched over every n-th chunk only
SEARCHED = ("norm_search_before", "norm_search_after")

Weights = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


def solve(
    chunks: Sequence[MoeInputs],
    weights: Weights,
    *,
    norm: torch.Tensor | None,
    offset: int = 0,
    router: torch.Tensor | None,
    shape: Sequence[int],
    gate: Gate,
    inner: bool = True,
    settings: Experts,
    batch_size: int,
    residents: Residents,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer from its Hessians.

    Args:
        chunks: captured MoE inputs in token chunks, on the device. Read several times, always in order.
        weights: from the numbers of some experts to their w1 above w3 (c, 2I, H) and w2 (c, H, I) in the dtype of the
            forward pass, in new memory. Called more than once.
        norm: (H,) as stored, in the source's dtype; None if no scale is to be folded into it.
        offset: added to the stored norm by the model, 0 or 1.
        router: (E, H), or with more rows, if it reads the norm; else None.
        shape: E and H.
        gate: of the experts.
        inner: whether AWQ's scale between w3 and w2 passes through the gate.
        batch_size: experts of an expert batch, see planning/expert_batches.py.
        residents: expert batches whose Hessians are cached at a time.
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
        routing = routing_statistics(
            chunks, experts, settings.routed_weight, full_share_at=hidden, batch_size=batch_size
        )
    cache = HessianCache(chunks, routing, hidden, residents)
    inputs = cache.of_all(batches)
    searched: dict[str, torch.Tensor] = {}
    folded, smooth = norm, torch.ones(hidden, device=inputs.hessian.device)
    if norm is not None and settings.awq:
        with phase("search"):
            scale, searched = norm_scale(
                lambda batch: weights(routing.experts[slice(*batch)])[0],
                inputs,
                settings,
                batches,
                experts,
                within_memory=cache.within_memory,
                dist=dist,
            )
            folded, smooth = fold_norm(norm, scale, offset)
    within = settings if inner else settings.model_copy(update={"awq": False})
    one = partial(_solve_batch, cache, weights, inputs.hessian, smooth, gate, within)
    parts = [cache.within_memory(partial(one, batches[first:])) for first in range(len(batches))]
    blend = routing.blend
    order = blend.experts.argsort()  # of each expert, its place among those that were solved
    solved = _gathered(parts, order, dist)
    codes = {matrix: solved.pop(f"codes.{matrix}") for matrix in MATRICES}
    scales = {matrix: solved.pop(f"scales.{matrix}") for matrix in MATRICES}
    numbers = to_host(
        solved | {"routed_tokens": blend.routed_tokens[order], "share": blend.share[order]} | searched
    )  # only now, when all batches are under way
    under_routed = {
        "full_share_at": blend.full_share_at,
        "experts": int((numbers["routed_tokens"] < blend.full_share_at).sum()),
        "smallest_share": float(numbers["share"].min()),
    }
    return LayerResult(
        folded,
        smooth,
        router.float() * smooth if router is not None and norm is not None and settings.awq else None,
        codes,
        scales,
        _errors(numbers, blend.tokens),
        _fallbacks(numbers, routing, settings, scales),
        under_routed if settings.routed_weight else None,
    )


def _solve_batch(
    cache: HessianCache,
    weights: Weights,
    all_hessian: torch.Tensor,
    smooth: torch.Tensor,
    gate: Gate,
    settings: Experts,
    waiting: Sequence[ExpertBatch],
) -> dict[str, torch.Tensor]:
    """Solve the first of the waiting expert batches, see `solve_batch`."""
    batch, routing = waiting[0], cache.routing
    hessian = cache.take(waiting)
    with phase("dequantize"):
        gate_up, down = weights(routing.experts[slice(*batch)])
    with phase("Hessians"):
        hessian = blended_hessian(hessian, all_hessian, routing.blend, batch)
        fold_hessian(hessian, smooth)
    collect = partial(collect_down_hessian, cache.chunks, routing, gate=gate, batch=batch)
    every = max(1, routing.rows // (SEARCH_TOKENS * down.shape[-1]))
    zero = _zero_groups(gate_up, down, settings.group_size)

    def when_rounded(rounded: torch.Tensor, compare: bool) -> DownHessian:
        # One rounding of the weights to the dtype of the forward pass, as a server does it.
        served = rounded if rounded.dtype == gate_up.dtype else torch.empty_like(gate_up)
        return collect(torch.div(rounded, smooth, out=served), source=gate_up if compare else None)

    solved = solve_batch(
        gate_up * smooth, down.float(), hessian, partial(collect, gate_up, every=every), when_rounded, settings
    )
    return solved | zero


def _gathered(
    parts: Sequence[dict[str, torch.Tensor]], order: torch.Tensor, dist: ProcessGroup
) -> dict[str, torch.Tensor]:
    """Results of all experts in the order of their numbers; order (E,) is their places among those of all batches.

    The parts of this process's expert batches are emptied, so that nothing is in memory twice.
    """
    rows = {name: torch.cat([part.pop(name) for part in parts]) for name in list(parts[0] if parts else ())}
    rows = dist.all_gather(rows, order.device)
    return {name: rows.pop(name).index_select(0, order) for name in list(rows)}


# The report's figures of a layer. Numbers are in float64 on the CPU: results of `solve_batch` but for codes and scales,
# `routed_tokens` and `share` of `Blend`, and SEARCHED.

Numbers = Mapping[str, torch.Tensor]


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


def _zero_groups(gate_up: torch.Tensor, down: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """For each matrix `…_zero`, (c,) int64: the number of its groups that are all zero, and get scale 1."""
    matrices = zip(MATRICES, (*gate_up.chunk(2, dim=1), down), strict=True)
    return {f"{matrix}_zero": grouped(weight, group).any(-1).logical_not_().sum((1, 2)) for matrix, weight in matrices}


def _zero_lines(numbers: Numbers, scales: Mapping[Matrix, torch.Tensor]) -> list[str]:
    """A line for every expert's matrix with such groups."""
    return [
        f"expert {expert}: {matrix}: {count:.0f} of {scales[matrix][0].numel()} groups are all zero, scale 1"
        for matrix in MATRICES
        for expert, count in enumerate(numbers[f"{matrix}_zero"].tolist())
        if count
    ]


def _fallbacks(
    numbers: Numbers, routing: RoutingStatistics, settings: Experts, scales: Mapping[Matrix, torch.Tensor]
) -> list[str]:
    """One line for every expert that did not get the method of the recipe; a smaller share is part of the method."""
    lines = []
    if left := routing.rows - routing.blend.tokens:
        lines.append(f"{left} rows of the block's input left out: not finite, or too large")
    columns = (numbers[name].tolist() for name in ("seen", "dropped", "routed_tokens", "share"))
    for expert, (rows, left_out, count, share) in enumerate(zip(*columns, strict=True)):
        name = f"expert {expert}"
        if left_out:
            lines.append(
                f"{name}: {left_out:.0f} of {rows + left_out:.0f} rows not finite or too large, left out of the Hessian"
            )
        if settings.routed_weight and not share:
            lines.append(f"{name}: {count:.0f} routed tokens, so all tokens count alike for it")
    for matrix in ("gate_up", "down"):
        for expert, used in enumerate(numbers.get(f"damping.{matrix}", torch.empty(0)).tolist()):
            if math.isinf(used):
                lines.append(f"expert {expert}: {matrix}: rounded to nearest, because its Hessian is not usable")
            elif used > 1.5 * DAMPING:
                lines.append(f"expert {expert}: {matrix}: damping raised to {used:g}")
    return lines + _zero_lines(numbers, scales)


def solve_layer(
    model: StreamedModel,
    layer: DecoderLayer,
    norm: torch.Tensor | None,
    moe_inputs: MoeInputStore,
    settings: Experts,
    *,
    weights: Weights,
    residents: Residents,
    entering: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer from the captured inputs of its experts, with either engine.

    Args:
        layer: with the source's weights, those of its experts only for the llmcompressor engine; left as it is.
        norm, weights, residents: see `solve`.
        entering: hidden states entering the layer, (T, H) each; the llmcompressor engine runs the layer itself.
        check: called between sequences; may raise to interrupt.
        dist: the processes that solve it together (gram only); each has all rows, and gets the whole result.
    """
    modules, norm = model.facts.modules, None if norm is None else norm.to(model.device)
    experts: Any = layer.module.get_submodule(modules.experts)
    own_gate = model.facts.of_layer(layer.number).own_gate
    if settings.engine == "gram":
        router: Any = layer.module.get_submodule(modules.router) if model.facts.router_follows else None
        accelerator, sizes = is_accelerator(model.device), model.sizes
        return solve(
            moe_inputs.chunks(model.device, tokens_per_chunk(accelerator), check),
            weights,
            norm=norm,
            offset=model.facts.norm.offset if model.facts.norm else 0,
            router=router and router.weight.data,
            shape=(sizes["experts"], sizes["hidden"]),
            gate=gate_of(experts, own_gate),
            inner=not own_gate,
            settings=settings,
            batch_size=experts_per_batch(accelerator, sizes["hidden"], sizes["width"]),
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
