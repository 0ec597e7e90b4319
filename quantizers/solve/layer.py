"""One layer from the recorded inputs of its experts to the solved experts, with either engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.device.devices import is_accelerator
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import RecordedRows
from quantizers.plan.device_memory import Residents
from quantizers.plan.units import rows_of_block, unit_of_experts
from quantizers.recipe.schema import Experts
from quantizers.team.team import ALONE, Team

from .gram_engine import Weights, solve
from .report_lines import zero_groups, zero_lines
from .solved import Solved


def solve_layer(
    model: LayeredModel,
    layer: torch.nn.Module,
    norm: torch.Tensor | None,
    recorded: RecordedRows,
    settings: Experts,
    *,
    weights: Weights,
    residents: Residents,
    entering: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
    team: Team = ALONE,
) -> Solved:
    """Solve one layer.

    Args:
        layer: with the source's weights, those of its experts only for the llmcompressor engine; left as it is.
        norm: (H,) as stored, in the source's dtype: the one that AWQ folds its scales into; None if it is kept.
        recorded: what the experts were called with.
        weights: see `gram_engine.solve`.
        residents: see plan/device_memory.py.
        entering: hidden states entering the layer, (T, H) each; the llmcompressor engine runs the layer itself.
        check: called between sequences; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).
        team: who does it together (gram only); each has all rows.

    Returns:
        The solution, the same for all team.
    """
    modules, norm = model.facts.modules, None if norm is None else norm.to(model.device)
    experts: Any = layer.get_submodule(modules.experts)
    if settings.engine == "gram":
        router: Any = layer.get_submodule(modules.router)
        accelerator, sizes = is_accelerator(model.device), model.sizes
        return solve(
            recorded.blocks(model.device, rows_of_block(accelerator), check),
            weights,
            norm=norm,
            offset=model.facts.norm.offset,
            router=router.weight.data,
            activation=experts.act_fn,
            settings=settings,
            unit=unit_of_experts(accelerator, sizes["hidden"], sizes["width"]),
            residents=residents,
            team=team,
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
