"""What each candidate scheme would do to one layer: the error of its experts' output.

For every candidate the scale search runs on the layer's sums, and the layer is scaled, folded and rounded in the
run's order, to the numbers that would be stored. Two things differ from the run. Codes are rounded to nearest, because
GPTQ would cost as much as the run itself and rank the candidates alike. And w2's sums come from the source's w1 and
w3, gathered once for all candidates, while the run gathers them again from the rounded ones. Then, in some sequences,
the tokens that the router sent to an expert pass through it as it is and as it would become:

    error = Σ_e Σ_t r² ‖f̂_e(x_t) − f_e(x_t)‖² / Σ_t ‖y_t‖²        (r: routing weight, y: states leaving the layer)

which makes layers comparable; errors of different experts on one token are taken as independent. The same with
only one matrix rounded says which matrix matters.

Legend: E experts, c experts of a unit, H hidden, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.forward.codes import dequantize
from quantizers.forward.recorded import Recorded
from quantizers.plan.units import units_of
from quantizers.recipe.schema import Experts, Scheme
from quantizers.solve.awq import divided, divided_first, fold_gram, fold_norm, grid_scales, scale_losses, weight_means
from quantizers.solve.expert_sums import WidthSums, width_sums
from quantizers.solve.forced_rows import Activation
from quantizers.solve.input_sums import InputSums, Unit, blended_gram, sweep
from quantizers.solve.norm_search import norm_scale
from quantizers.solve.rounding import minmax_scales, mse_scales, nearest
from quantizers.solve.token_weights import Table, survey
from quantizers.team.team import ALONE, Team

Weights = Mapping[Matrix, torch.Tensor]  # gate and up (c, I, H), down (c, H, I), float32, in the source's basis
ALL_THREE = "all"


@dataclass(frozen=True)
class SchemeErrors:
    """What was measured on some experts of one layer.

    Attributes:
        lost: Σ r² ‖error‖² by scheme, and by which matrix alone was rounded (or all of them).
        coarsest: gate_up (E', 2I, H) and down (E', H, I) of these experts as the first scheme leaves them, on
            the CPU in the dtype of the forward pass.
    """

    lost: dict[Scheme, dict[str, float]]
    coarsest: tuple[torch.Tensor, torch.Tensor]


def scheme_errors(
    blocks: Sequence[Recorded],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    norm: torch.Tensor | None,
    offset: int = 0,
    activation: Activation,
    settings: Experts,
    schemes: Sequence[Scheme],
    experts: int,
    unit: int,
    compared: Sequence[Recorded],
    team: Team = ALONE,
) -> SchemeErrors:
    """Measure the first `experts` experts of a layer. Their order is arbitrary, so they are a fair sample of all.

    Args:
        blocks: what the MoE block saw, see `gram_engine.solve`.
        gate_up, down: (E, 2I, H) and (E, H, I), all experts, in the dtype of the forward pass.
        norm, offset: see `gram_engine.solve`.
        schemes: the candidates.
        unit: experts worked on at a time.
        compared: the sequences on which outputs are compared; the sums are of all.
        team: each process works on its share of the units; all of them get the whole result.
    """
    all_experts, _, hidden = gate_up.shape
    units = units_of(experts, unit)
    units = [units[i] for i in team.share(len(units))]
    found = survey(blocks, all_experts, settings.routed_weight, full_share_at=hidden)
    tables = survey(compared, all_experts, settings.routed_weight, full_share_at=hidden).tables
    inputs, routed = sweep(blocks, found, units[:1], hidden, with_all=True)
    assert inputs is not None
    settings_of = {s: settings.model_copy(update={"bits": s.bits, "group_size": s.group_size}) for s in schemes}
    measured = gate_up[:experts]
    smooth = {s: _smooth(measured, inputs, norm, offset, own, units, team) for s, own in settings_of.items()}
    lost: list[tuple[Scheme, dict[str, float]]] = []  # unit by unit
    coarsest: dict[str, list[torch.Tensor]] = {"gate_up": [], "down": []}
    for own_unit in units:
        first, last = own_unit
        if own_unit not in routed:
            routed = sweep(blocks, found, [own_unit], hidden, with_all=False)[1]
        input_gram = blended_gram(routed.pop(own_unit), inputs.gram, found.blended, own_unit)
        sums = width_sums(blocks, found, gate_up[first:last], activation=activation, unit=own_unit)
        gate, up = gate_up[first:last].float().chunk(2, dim=1)
        source: Weights = {"gate": gate, "up": up, "down": down[first:last].float()}
        for scheme, own in settings_of.items():
            stored = _as_stored(source, smooth[scheme], input_gram, sums, own)
            variants = {ALL_THREE: stored} | {m: {**source, m: stored[m]} for m in MATRICES}
            errors = _output_errors(compared, tables, source, variants, activation, first)
            lost.append((scheme, errors))
            if scheme == schemes[0]:
                both = torch.cat([stored["gate"], stored["up"]], dim=1), stored["down"]
                for name, matrix in zip(coarsest, both, strict=True):
                    coarsest[name].append(matrix.to(gate_up.dtype).cpu())
    totals = {scheme: dict.fromkeys((ALL_THREE, *MATRICES), 0.0) for scheme in schemes}
    for scheme, errors in (one for part in team.collect(lost) for one in part):  # in the order of units
        for name, value in errors.items():
            totals[scheme][name] += value
    whole = team.gather({n: torch.cat(parts) for n, parts in coarsest.items() if parts}, torch.device("cpu"))
    return SchemeErrors(totals, (whole["gate_up"], whole["down"]))


def _smooth(
    gate_up: torch.Tensor,
    inputs: InputSums,
    norm: torch.Tensor | None,
    offset: int,
    own: Experts,
    units: Sequence[Unit],
    team: Team,
) -> torch.Tensor:
    """What a scheme would divide the norm by, (H,), exactly as the rounded norm has it; ones where it is kept.

    Args:
        gate_up: (E', 2I, H) of the experts that are measured.
        units: this process's.
    """
    if not own.awq or norm is None:
        return torch.ones_like(inputs.mean)

    def weights(unit: Unit) -> torch.Tensor:
        return gate_up[slice(*unit)]

    def at_once(work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()  # no sums are held here that could make room

    scale, _ = norm_scale(weights, inputs, own, units, len(gate_up), within_memory=at_once, team=team)
    return fold_norm(norm, scale, offset)[1]


def _as_stored(
    source: Weights,
    smooth: torch.Tensor,
    input_gram: torch.Tensor,
    sums: WidthSums,
    own: Experts,
) -> Weights:
    """The matrices after scaling and rounding, in the run's order, and scaling back."""
    s = torch.ones_like(sums.mean)  # (c, I): divides w3's rows, multiplies w2's columns
    if own.awq:
        grid = grid_scales(sums.mean, weight_means(source["down"], own.group_size), own.awq.grid, own.awq.duo_scaling)
        best = scale_losses(source["down"], sums.gram, grid, own.group_size, own.bits).argmin(0)
        s = grid[best, torch.arange(len(best), device=best.device)]
    importance = fold_gram(input_gram, smooth.unsqueeze(0)).diagonal(dim1=-2, dim2=-1)
    gate = dequantize(*_rounded(source["gate"] * smooth, importance, own))
    rows = s.unsqueeze(-1)
    if divided_first(own.bits):
        codes, scale = _rounded(source["up"] * smooth / rows, importance, own)
    else:
        codes, scale = _rounded(source["up"] * smooth, importance, own)
        scale = divided(scale, codes, s)
    up = dequantize(codes, scale) * rows
    importance = fold_gram(sums.gram, s).diagonal(dim1=-2, dim2=-1)
    down = dequantize(*_rounded(source["down"] * s.unsqueeze(1), importance, own))
    return {"gate": gate / smooth, "up": up / smooth, "down": down / s.unsqueeze(1)}


def _rounded(weight: torch.Tensor, importance: torch.Tensor, own: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest codes and scales of (c, R, C); importance (c, C)."""
    if own.scales == "mse":
        scale = mse_scales(weight, importance, own.group_size, own.bits)
    else:
        scale = minmax_scales(weight, own.group_size, own.bits)
    return nearest(weight, scale, own.bits), scale


def _output_errors(
    sequences: Sequence[Recorded],
    tables: Sequence[Table],
    source: Weights,
    variants: Mapping[str, Weights],
    activation: Activation,
    first: int,
) -> dict[str, float]:
    """Σ r² ‖error of an expert's output‖² over the tokens routed to this unit's experts, for each variant."""
    last = first + len(source["down"])
    lost = {name: torch.zeros((), dtype=torch.float64, device=source["down"].device) for name in variants}
    for sequence, table in zip(sequences, tables, strict=True):
        for rows, weight in table.routed(first, last):
            x = sequence.x[rows].float()  # (c, m, H)
            wanted = _forward(x, source, activation)
            for name, weights in variants.items():
                error = (_forward(x, weights, activation) - wanted).square().sum(-1) * weight.square()
                lost[name] += torch.where(torch.isfinite(error), error, torch.zeros_like(error)).double().sum()
    return {name: float(value) for name, value in lost.items()}


def _forward(x: torch.Tensor, weights: Weights, activation: Activation) -> torch.Tensor:
    """(c, T, H) from (c, T, H)."""
    return (activation(x @ weights["gate"].mT) * (x @ weights["up"].mT)) @ weights["down"].mT
