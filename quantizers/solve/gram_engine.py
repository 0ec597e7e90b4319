"""The gram engine: one layer's recorded inputs and weights ─► its solved experts.

Order: one sweep over the rows' routing ─► one over the rows, for the sums of x ─► one scale for the norm and all its
readers, where it is folded ─► unit by unit of experts, as batched matrices, what expert_unit.py does. The other
engine, the library's own, is llmcompressor_engine.py.

Every matmul works on one block of rows or one unit of experts, see plan/units.py. Memory decides how many units have
their sums of x gathered in one sweep. Where it does not suffice, fewer are gathered, and nothing else changes.

Legend: E experts, c experts of a unit, H hidden, I expert width, G Gram matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.device.allocator import release_free_memory
from quantizers.device.fetch import fetched
from quantizers.device.kind import accelerated
from quantizers.device.timing import phase
from quantizers.forward.recorded import Recorded
from quantizers.plan.units import units_of
from quantizers.recipe.schema import Awq, Experts
from quantizers.system.residents import Residents
from quantizers.team.ranks import ALONE, Ranks

from .awq import fold_norm, grid_scales, row_step, scale_losses, weight_means
from .expert_sums import Activation, WidthSums, width_sums
from .expert_unit import SolvedUnit, solve_unit
from .input_sums import InputSums, Unit, blended_gram, sweep
from .report_lines import errors_of, fallbacks, leaning, zero_groups
from .solved import Solved
from .token_weights import Survey, survey

SEARCH_TOKENS = 16  # with 8 bits, tokens for each column of w2: with more, s is searched over every n-th block only

Weights = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def solve(
    blocks: Sequence[Recorded],
    weights: Weights,
    *,
    norm: torch.Tensor | None,
    offset: int = 0,
    router: torch.Tensor,
    activation: Activation,
    settings: Experts,
    unit: int,
    residents: Residents,
    ranks: Ranks = ALONE,
) -> Solved:
    """Solve one layer from sums.

    Args:
        blocks: what the MoE block saw, in blocks of rows, on the device. Read several times, always in order.
        weights: from the first and last (exclusive) of some experts to their w1 above w3 (c, 2I, H) and w2 (c, H, I)
            in the dtype of the forward pass, in new memory. Asked for more than once.
        norm: (H,) as stored, in the source's dtype; None if no scale is to be folded into it.
        offset: what the model adds to the stored norm, 0 or 1.
        router: (E, H).
        activation: of the gate, usually SiLU.
        unit: experts of a unit, see `plan.units`.
        residents: how many units have their sums in memory at a time; decides no byte.
        ranks: each process solves its share of the units, which are those of one process, so that not
            even the shape of a matmul differs; all of them get the whole result.

    Returns:
        The solved layer; `error` holds the AWQ objective per token before and after the search, and
        the rounding errors on the calibration inputs, relative to the output of the matrices that were
        rounded (with gptq that is the corrected w2, on the inputs that the rounded w1 and w3 give it); and
        `expert_tokens`, the fewest tokens that an expert saw.

    Raises:
        QuantizeError: the device's memory is too small for one unit.
    """
    experts, hidden = router.shape
    units = units_of(experts, unit)
    units = [units[i] for i in ranks.contiguous(len(units))]
    with phase("sums"):
        found = survey(blocks, experts, settings.routed_weight, full_share_at=hidden)
    gather = partial(_gathered, blocks, found, hidden, residents)
    inputs, sums = gather(units, with_all=True)
    assert inputs is not None
    searched: dict[str, torch.Tensor] = {}
    folded, smooth = norm, torch.ones(hidden, device=router.device)
    if norm is not None and settings.awq:
        with phase("search"):
            shared, searched = _norm_scale(weights, inputs, settings, units, experts, ranks=ranks)
            folded, smooth = fold_norm(norm, shared, offset)
    work = _Work(blocks, found, weights, inputs.gram, smooth, activation, settings)
    solved = _solve_units(work, units, sums, gather, residents, careful=not accelerated(router.device))
    again = _without_factor(solved, units) if accelerated(router.device) else []
    solved |= _solve_units(work, again, {}, gather, residents, careful=True)
    whole = _together([solved[unit] for unit in units], ranks, router.device)
    # Numbers for the report are fetched once all units are under way: a GPU never waits for them.
    numbers = fetched(whole.totals | {f"damping.{name}": used for name, used in whole.damping.items()} | searched)
    return Solved(
        folded,
        smooth,
        router.float() * smooth if norm is not None and settings.awq else None,
        {matrix: whole.codes[matrix] for matrix in MATRICES},
        {matrix: whole.scales[matrix] for matrix in MATRICES},
        errors_of(numbers, found.blended.tokens),
        fallbacks(numbers, found, settings, {matrix: whole.scales[matrix][0].numel() for matrix in MATRICES}),
        leaning(found.blended) if settings.routed_weight else None,
    )


def _norm_scale(
    weights: Weights, inputs: InputSums, settings: Experts, units: Sequence[Unit], experts: int, *, ranks: Ranks
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The scale (H,) that the norm, the router and every w1 and w3 share, before the norm is rounded.

    Returns:
        The scale; and the objective before and after, two numbers on the device.
    """
    assert isinstance(settings.awq, Awq)
    group, bits, device = settings.group_size, settings.bits, inputs.gram.device
    means = _all_rows([weight_means(weights(*unit)[0].float(), group) for unit in units], ranks, device)
    means = means.mean(0, keepdim=True)
    grid = grid_scales(inputs.mean.unsqueeze(0), means, settings.awq.grid, settings.awq.duo_scaling)
    losses, step = [], 1
    for unit in units:
        gate_up = weights(*unit)[0]
        step = row_step(experts, gate_up.shape[1])
        losses.append(scale_losses(gate_up[:, ::step].float(), inputs.gram.unsqueeze(0), grid, group, bits).T * step)
    total = _all_rows(losses, ranks, device).T.double().sum(1)  # (P,), added in the order of experts
    best = total.argmin()
    return grid.index_select(0, best.view(1))[0, 0], {
        "norm_search_before": total[0],
        "norm_search_after": total.index_select(0, best.view(1))[0],
    }


def _gathered(
    blocks: Sequence[Recorded],
    found: Survey,
    hidden: int,
    residents: Residents,
    waiting: Sequence[Unit],
    *,
    with_all: bool = False,
) -> tuple[InputSums | None, dict[Unit, torch.Tensor]]:
    """The sums of as many of the waiting units as there is memory for, from one sweep; of fewer if it does not do."""
    while True:
        try:
            with phase("sums"):
                return sweep(blocks, found, waiting[: residents.share(len(waiting))], hidden, with_all=with_all)
        except torch.OutOfMemoryError:
            pass  # what was gathered is freed when this block ends
        residents.shrink()
        release_free_memory()


@dataclass(frozen=True)
class _Work:
    """What every unit of a layer is solved with, see `solve`."""

    blocks: Sequence[Recorded]
    found: Survey
    weights: Weights
    all_gram: torch.Tensor
    smooth: torch.Tensor
    activation: Activation
    settings: Experts


def _solve_units(
    work: _Work,
    units: Sequence[Unit],
    sums: dict[Unit, torch.Tensor],
    gather: Callable[[Sequence[Unit]], tuple[InputSums | None, dict[Unit, torch.Tensor]]],
    residents: Residents,
    *,
    careful: bool,
) -> dict[Unit, SolvedUnit]:
    """Solve units one after the other; `sums` are those already gathered. One that does not fit is solved again."""
    solved: dict[Unit, SolvedUnit] = {}
    waiting = list(units)
    while waiting:
        unit = waiting[0]
        if unit not in sums:
            release_free_memory()  # otherwise memory that one unit freed sometimes adds to the peak of the next
            sums = gather(waiting)[1]
        try:
            solved[unit] = _solve_one(work, unit, sums, careful=careful)
        except torch.OutOfMemoryError:
            sums = {}
        else:
            waiting.pop(0)
            continue
        residents.shrink()
        release_free_memory()
    return solved


def _solve_one(work: _Work, unit: Unit, sums: dict[Unit, torch.Tensor], *, careful: bool) -> SolvedUnit:
    own, down = work.weights(*unit)
    with phase("sums"):
        gram = blended_gram(sums.pop(unit), work.all_gram, work.found.blended, unit)
        gram.div_(work.smooth.unsqueeze(-1) * work.smooth)  # see awq.fold_gram
    width_inputs = partial(width_sums, work.blocks, work.found, activation=work.activation, unit=unit)
    every = max(1, work.found.rows // (SEARCH_TOKENS * down.shape[-1]))
    zero = _zero_groups(own, down, work.settings.group_size)
    solved = solve_unit(
        own.float() * work.smooth,
        down.float(),
        gram,
        partial(width_inputs, own, every=every),
        partial(_sums_when_rounded, width_inputs, own, work.smooth),
        work.settings,
        careful=careful,
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
    sums: Callable[..., WidthSums], gate_up: torch.Tensor, smooth: torch.Tensor, rounded: torch.Tensor, compare: bool
) -> WidthSums:
    """Sums of what w2 reads when w1 and w3 are rounded.

    Args:
        sums: `width_sums`, given everything but weights.
        gate_up: (c, 2I, H), the source's w1 and w3.
        rounded: (c, 2I, H) float32, codes times scales, which read x / smooth. Changed.
        compare: also sum the changes from what the source's w1 and w3 give.
    """
    # One rounding of the weights to the dtype of the forward pass, as a server does it.
    return sums(rounded.div_(smooth).to(gate_up.dtype), source=gate_up if compare else None)


def _without_factor(solved: dict[Unit, SolvedUnit], units: Sequence[Unit]) -> list[Unit]:
    """The units with an expert whose Gram matrix had no factor at the first damping; one synchronisation."""
    used = fetched({str(unit): torch.cat([*solved[unit].damping.values()]) for unit in units if solved[unit].damping})
    return [unit for unit in units if str(unit) in used and bool(used[str(unit)].isinf().any())]


def _all_rows(parts: Sequence[torch.Tensor], ranks: Ranks, device: torch.device) -> torch.Tensor:
    """(E, …): the rows of all experts, from those (c, …) of this process's units."""
    return ranks.gather({"rows": torch.cat(list(parts))} if parts else {}, device)["rows"]


def _together(parts: Sequence[SolvedUnit], ranks: Ranks, device: torch.device) -> SolvedUnit:
    """All experts in their order, from this process's units."""
    rows: dict[str, torch.Tensor] = {}
    for field in SolvedUnit.__annotations__:
        for key in list(getattr(parts[0], field)) if parts else ():  # popped, so that not all lies there twice
            rows[f"{field}.{key}"] = torch.cat([getattr(part, field).pop(key) for part in parts])
    whole = SolvedUnit({}, {}, {}, {})
    for name, tensor in ranks.gather(rows, device).items():
        field, _, key = name.partition(".")
        getattr(whole, field)[key] = tensor
    return whole
