"""One layer from the recorded inputs of its experts to the solved experts, with either engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import RecordedRows
from quantizers.recipe.schema import Experts
from quantizers.team.ranks import ALONE, Ranks

from .gram_engine import solve
from .solved import Solved


def solve_layer(
    model: LayeredModel,
    layer: torch.nn.Module,
    norm: torch.Tensor | None,
    recorded: RecordedRows,
    settings: Experts,
    *,
    chunk: int,
    entering: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
    ranks: Ranks = ALONE,
) -> Solved:
    """Solve one layer.

    Args:
        layer: with the source's weights; left as it is.
        norm: (H,) as stored, in the source's dtype: the one that AWQ folds its scales into; None if it is kept.
        recorded: what the experts were called with.
        entering: hidden states entering the layer, (T, H) each; the llmcompressor engine runs the layer itself.
        check: called between sequences; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).
        ranks: who does it together (gram only), with rows in files that all of them map.

    Returns:
        The solution, the same for all ranks.
    """
    modules, norm = model.facts.modules, None if norm is None else norm.to(model.device)
    experts: Any = layer.get_submodule(modules.experts)
    if settings.engine == "llmcompressor":
        from .llmcompressor_engine import solve_with_llmcompressor

        solved = solve_with_llmcompressor(
            copy.deepcopy(layer),  # the library replaces the experts' module
            [model.inputs(states) for states in entering],
            settings,
            norm=None if norm is None else modules.norm,
            router=modules.router,
            experts=modules.experts,
            compensate_router=compensate_router,
            norm_dtype=torch.bfloat16 if norm is None else norm.dtype,
        )
    else:
        router: Any = layer.get_submodule(modules.router)
        solved = solve(
            recorded.sequences(model.device, check),
            experts.gate_up_proj.data,
            experts.down_proj.data,
            norm=norm,
            offset=model.facts.norm.offset,
            router=router.weight.data,
            activation=experts.act_fn,
            settings=settings,
            chunk=chunk,
            ranks=ranks,
        )
    solved.fallbacks.extend(zero_groups(experts.gate_up_proj.data, experts.down_proj.data, settings.group_size))
    return solved


def zero_groups(gate_up: torch.Tensor, down: torch.Tensor, group: int) -> list[str]:
    """A line for every expert's matrix with groups that are all zero: they have no scale, and are given 1.

    Args:
        gate_up: (E, 2I, H), w1 above w3.
        down: (E, H, I), w2.
    """
    gate, up = gate_up.chunk(2, dim=1)
    lines = []
    for matrix, weight in zip(MATRICES, (gate, up, down), strict=True):
        zero = torch.stack([~one.view(-1, group).any(-1) for one in weight])  # (E, groups)
        for expert, count in enumerate(zero.sum(1).tolist()):
            if count:
                lines.append(f"expert {expert}: {matrix}: {count} of {zero.shape[1]} groups are all zero, scale 1")
    return lines
