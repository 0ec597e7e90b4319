"""The native solver (`engine: gram`): one layer's captured MoE inputs and weights ─► its quantized experts.

Order: one sweep over the routing ─► one over the token chunks, for the Hessians of x ─► one scale for the norm and all
its readers, where it is folded ─► expert batch by expert batch, see expert_batch.py. The other engine, llm-compressor's
own, is llmcompressor_engine.py.

Every matmul works on one token chunk or one expert batch, see planning/expert_batches.py. Memory only decides for how
many expert batches the Hessians of x are collected in one sweep, see planning/device_memory.py.

Legend: E experts, c experts of an expert batch, H hidden, I expert width, G Hessian.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import to_host
from quantizers.device.timing import phase
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.moe_inputs import MoeInputs, MoeInputStore
from quantizers.planning.device_memory import Residents
from quantizers.planning.expert_batches import expert_batches, experts_per_batch, tokens_per_chunk
from quantizers.recipe.schema import Experts

from .awq import fold_hessian, fold_norm, norm_scale
from .down_hessian import Activation, DownHessian, collect_down_hessian
from .expert_batch import SolvedBatch, solve_batch
from .input_hessian import ExpertBatch, HessianCache, blended_hessian
from .layer_report import errors_of, fallbacks, leaning, zero_groups, zero_lines
from .result import LayerResult
from .routing_weights import survey

SEARCH_TOKENS = 16  # with 8 bits, tokens for each column of w2: with more, s is searched over every n-th block only

Weights = Callable[[Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


def solve(
    blocks: Sequence[MoeInputs],
    weights: Weights,
    *,
    norm: torch.Tensor | None,
    offset: int = 0,
    router: torch.Tensor,
    activation: Activation,
    settings: Experts,
    unit: int,
    residents: Residents,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer from its Hessians.

    Args:
        blocks: captured MoE inputs in token chunks, on the device. Read several times, always in order.
        weights: from the numbers of some experts to their w1 above w3 (c, 2I, H) and w2 (c, H, I) in the dtype of the
            forward pass, in new memory. Asked for more than once.
        norm: (H,) as stored, in the source's dtype; None if no scale is to be folded into it.
        offset: what the model adds to the stored norm, 0 or 1.
        router: (E, H).
        activation: of the gate, usually SiLU.
        unit: experts of an expert batch, see `planning.expert_batches`.
        residents: expert batches whose Hessians are kept at a time; decides no byte.
        dist: each process solves its share of the units, which are those of one process, so that not
            even the shape of a matmul differs; all of them get the whole result.

    Returns:
        The solved layer; `error` holds the AWQ objective per token before and after the search, and
        the rounding errors on the calibration inputs, relative to the output of the matrices that were
        rounded (with gptq that is the corrected w2, on the inputs that the rounded w1 and w3 give it); and
        `expert_tokens`, the fewest tokens that an expert saw.

    Raises:
        QuantizeError: the device's memory is too small for one expert batch.
    """
    experts, hidden = router.shape
    # To see whether a factorization failed, a GPU would have to be waited for each time.
    exact = not is_accelerator(router.device)
    units = expert_batches(experts, unit)
    units = [units[i] for i in dist.partition(len(units))]
    with phase("sums"):
        found = survey(blocks, experts, settings.routed_weight, full_share_at=hidden, unit=unit)
    held = HessianCache(blocks, found, hidden, residents)
    inputs = held.of_all(units)
    searched: dict[str, torch.Tensor] = {}
    folded, smooth = norm, torch.ones(hidden, device=router.device)
    if norm is not None and settings.awq:
        with phase("search"):
            shared, searched = norm_scale(
                lambda own: weights(found.experts[slice(*own)])[0],
                inputs,
                settings,
                units,
                experts,
                within_memory=held.within_memory,
                dist=dist,
            )
            folded, smooth = fold_norm(norm, shared, offset)
    one = partial(_solve_batch, held, weights, inputs.hessian, smooth, activation, settings)
    solved = _solve_batches(one, held, units, exact=exact)
    solved |= _solve_batches(one, held, [] if exact else _in_doubt(solved, units), exact=True)
    places = found.blended.experts.argsort()  # of each expert, in the order in which they were solved
    whole = _together([solved[unit] for unit in units], places, dist)
    # Numbers for the report are fetched once all units are under way: a GPU never waits for them.
    damping = {f"damping.{name}": used for name, used in whole.damping.items()}
    blended = {"routed_tokens": found.blended.routed_tokens[places], "share": found.blended.share[places]}
    numbers = to_host(whole.totals | damping | blended | searched)
    return LayerResult(
        folded,
        smooth,
        router.float() * smooth if norm is not None and settings.awq else None,
        {matrix: whole.codes[matrix] for matrix in MATRICES},
        {matrix: whole.scales[matrix] for matrix in MATRICES},
        errors_of(numbers, found.blended.tokens),
        fallbacks(numbers, found, settings, {matrix: whole.scales[matrix][0].numel() for matrix in MATRICES}),
        leaning(numbers, found.blended.full_share_at) if settings.routed_weight else None,
    )


def _solve_batches(
    one: Callable[..., SolvedBatch], held: HessianCache, units: Sequence[ExpertBatch], *, exact: bool
) -> dict[ExpertBatch, SolvedBatch]:
    """Solve expert batches one after the other."""
    return {unit: held.within_memory(partial(one, units[place:], exact=exact)) for place, unit in enumerate(units)}


def _solve_batch(
    held: HessianCache,
    weights: Weights,
    all_hessian: torch.Tensor,
    smooth: torch.Tensor,
    activation: Activation,
    settings: Experts,
    waiting: Sequence[ExpertBatch],
    *,
    exact: bool,
) -> SolvedBatch:
    """Solve the first of the waiting expert batches."""
    unit, found = waiting[0], held.found
    hessian = held.take(waiting)
    with phase("dequantize"):
        own, down = weights(found.experts[slice(*unit)])
    with phase("sums"):
        hessian = blended_hessian(hessian, all_hessian, found.blended, unit)
        fold_hessian(hessian, smooth)
    width_inputs = partial(collect_down_hessian, held.blocks, found, activation=activation, unit=unit)
    every = max(1, found.rows // (SEARCH_TOKENS * down.shape[-1]))
    zero = _zero_groups(own, down, settings.group_size)
    solved = solve_batch(
        own * smooth,
        down.float(),
        hessian,
        partial(width_inputs, own, every=every),
        partial(_sums_when_rounded, width_inputs, own, smooth),
        settings,
        exact=exact,
    )
    solved.totals |= zero
    return solved


def _zero_groups(gate_up: torch.Tensor, down: torch.Tensor, group: int) -> dict[str, torch.Tensor]:
    """How many groups of each expert's matrices are all zero, (c,) each, for the report."""
    gate, up = gate_up.chunk(2, dim=1)
    return {
        f"{matrix}_zero": zero_groups(weight, group) for matrix, weight in zip(MATRICES, (gate, up, down), strict=True)
    }


def _sums_when_rounded(
    sums: Callable[..., DownHessian], gate_up: torch.Tensor, smooth: torch.Tensor, rounded: torch.Tensor, compare: bool
) -> DownHessian:
    """Hessians of the inputs of w2 when w1 and w3 are rounded.

    Args:
        sums: `collect_down_hessian`, given everything but weights.
        gate_up: (c, 2I, H), the source's w1 and w3.
        rounded: (c, 2I, H) float32, codes times scales, which read x / smooth. Changed.
        compare: also sum the changes from what the source's w1 and w3 give.
    """
    # One rounding of the weights to the dtype of the forward pass, as a server does it.
    served = rounded if rounded.dtype == gate_up.dtype else torch.empty_like(gate_up)
    return sums(torch.div(rounded, smooth, out=served), source=gate_up if compare else None)


def _in_doubt(solved: dict[ExpertBatch, SolvedBatch], units: Sequence[ExpertBatch]) -> list[ExpertBatch]:
    """Expert batches with an expert whose Hessian had no factor at the first damping.

    One synchronisation.
    """
    looks = {str(unit): torch.cat([*own.damping.values()]) for unit, own in solved.items() if own.damping}
    found = to_host(looks)
    return [unit for unit in units if str(unit) in found and bool(found[str(unit)].isinf().any())]


def _together(parts: Sequence[SolvedBatch], places: torch.Tensor, dist: ProcessGroup) -> SolvedBatch:
    """All experts in the order of their numbers, from this process's units. Popped, so that not all lies there twice.

    Args:
        parts: emptied.
        places: (E,) of the experts among those of all units.
    """
    rows = dist.all_gather(_rows(parts), places.device)
    whole = SolvedBatch({}, {}, {}, {})
    for name in list(rows):
        field, _, key = name.partition(".")
        getattr(whole, field)[key] = rows.pop(name).index_select(0, places)
    return whole


def _rows(parts: Sequence[SolvedBatch]) -> dict[str, torch.Tensor]:
    """What there is of every expert of some units, one below the other."""
    rows: dict[str, torch.Tensor] = {}
    for field in SolvedBatch.__annotations__:
        for key in list(getattr(parts[0], field)) if parts else ():
            rows[f"{field}.{key}"] = torch.cat([getattr(part, field).pop(key) for part in parts])
    return rows


# One layer from the recorded inputs of its experts to the solved experts, with either engine.


def solve_layer(
    model: LayeredModel,
    layer: torch.nn.Module,
    norm: torch.Tensor | None,
    moe_inputs: MoeInputStore,
    settings: Experts,
    *,
    weights: Weights,
    residents: Residents,
    entering: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> LayerResult:
    """Solve one layer.

    Args:
        layer: with the source's weights, those of its experts only for the llmcompressor engine; left as it is.
        norm: (H,) as stored, in the source's dtype: the one that AWQ folds its scales into; None if it is kept.
        moe_inputs: what the experts were called with.
        weights: see `solver.solve`.
        residents: see planning/device_memory.py.
        entering: hidden states entering the layer, (T, H) each; the llmcompressor engine runs the layer itself.
        check: called between sequences; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).
        dist: who does it together (gram only); each has all rows.

    Returns:
        The solution, the same for all dist.
    """
    modules, norm = model.facts.modules, None if norm is None else norm.to(model.device)
    experts: Any = layer.get_submodule(modules.experts)
    if settings.engine == "gram":
        router: Any = layer.get_submodule(modules.router)
        accelerator, sizes = is_accelerator(model.device), model.sizes
        return solve(
            moe_inputs.chunks(model.device, tokens_per_chunk(accelerator), check),
            weights,
            norm=norm,
            offset=model.facts.norm.offset,
            router=router.weight.data,
            activation=experts.act_fn,
            settings=settings,
            unit=experts_per_batch(accelerator, sizes["hidden"], sizes["width"]),
            residents=residents,
            dist=dist,
        )
    from .llmcompressor_engine import solve_with_llmcompressor

    solved = solve_with_llmcompressor(
        copy.deepcopy(layer),  # the library replaces the experts' module
        [model.inputs(states.unsqueeze(0)) for states in entering],
        settings,
        norm=None if norm is None else modules.norm,
        router=modules.router,
        experts=modules.experts,
        compensate_router=compensate_router,
        norm_dtype=torch.bfloat16 if norm is None else norm.dtype,
    )
    gate, up = experts.gate_up_proj.data.chunk(2, dim=1)
    zero = {
        matrix: zero_groups(weight, settings.group_size).tolist()
        for matrix, weight in zip(MATRICES, (gate, up, experts.down_proj.data), strict=True)
    }
    solved.fallbacks.extend(zero_lines(zero, {matrix: solved.scales[matrix][0].numel() for matrix in MATRICES}))
    return solved
