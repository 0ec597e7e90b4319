"""One layer from its inputs to its solved experts, with either engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantizers.architectures.matrices import MATRICES, Matrix
from quantizers.forward.codes import dequantize
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import Recorded
from quantizers.recipe.schema import Experts
from quantizers.team.ranks import ALONE, Ranks

from .gram_engine import solve
from .solved import Solved

INSTALLED_AT_ONCE = 16  # experts whose rounded weights are in float32 at the same time on an accelerator


@dataclass
class LayerStores:
    """Where a layer's recorded inputs are kept while it is solved: lists that may live in files.

    Attributes:
        x, chosen, weight: one entry a sequence, see `Recorded`.
    """

    x: Any
    chosen: Any
    weight: Any

    def recorded(self, device: torch.device, check: Callable[[], None]) -> Sequence[Recorded]:
        """The sequences as the engine reads them, moved to the device one at a time; `check` is called at each."""
        return _OnDevice(self, device, check)


class _OnDevice(Sequence[Recorded]):
    def __init__(self, stores: LayerStores, device: torch.device, check: Callable[[], None]) -> None:
        self.stores, self.device, self.check = stores, device, check

    def __len__(self) -> int:
        return len(self.stores.x)

    def __getitem__(self, index: int) -> Recorded:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.check()
        stores, device = self.stores, self.device
        return Recorded(
            stores.x[index].to(device), stores.chosen[index].long().to(device), stores.weight[index].to(device)
        )


def solve_layer(
    model: LayeredModel,
    layer: torch.nn.Module,
    number: int,
    states: Sequence[torch.Tensor],
    stores: LayerStores,
    settings: Experts,
    *,
    chunk: int,
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
    ranks: Ranks = ALONE,
) -> tuple[Solved, dict[str, float]]:
    """Observe and solve one layer.

    Args:
        layer: materialised; left as it is.
        states: hidden states entering the layer, (T, H) each.
        stores: filled here.
        check: called between sequences; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).
        ranks: who does it together (gram only), with stores in files that all of them map.

    Returns:
        The solution, the same for all ranks, and seconds by phase: observe and solve.
    """
    facts = model.facts
    started = time.monotonic()
    for i in ranks.round_robin(len(states)):
        seen = model.record(layer, states[i])
        stores.x[i], stores.chosen[i], stores.weight[i] = seen.x, seen.chosen, seen.weight
        check()
    ranks.barrier()
    observed = time.monotonic()
    norm = model.checkpoint.tensor(facts.layer(number, facts.fold.norm)).to(model.device)
    experts: Any = layer.get_submodule(facts.modules.experts)
    if settings.engine == "llmcompressor":
        from .llmcompressor_engine import solve_with_llmcompressor

        solved = solve_with_llmcompressor(
            copy.deepcopy(layer),  # the library replaces the experts' module
            [model.inputs(states[i]) for i in range(len(states))],
            settings,
            norm=facts.modules.norm,
            router=facts.modules.router,
            experts=facts.modules.experts,
            compensate_router=compensate_router,
            norm_dtype=norm.dtype,
        )
    else:
        router: Any = layer.get_submodule(facts.modules.router)
        solved = solve(
            stores.recorded(model.device, check),
            experts.gate_up_proj.data,
            experts.down_proj.data,
            norm=norm,
            router=router.weight.data,
            activation=experts.act_fn,
            settings=settings,
            chunk=chunk,
            ranks=ranks,
        )
    solved.fallbacks.extend(zero_groups(experts.gate_up_proj.data, experts.down_proj.data, settings.group_size))
    return solved, {"observe": observed - started, "solve": time.monotonic() - observed}


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


def install(model: LayeredModel, layer: torch.nn.Module, solved: Solved) -> None:
    """Give a materialised layer the weights that a reader of the finished checkpoint will see."""
    facts = model.facts
    layer.get_submodule(facts.modules.norm).weight.data = solved.norm.to(model.device, model.dtype)
    if solved.router is not None:
        layer.get_submodule(facts.modules.router).weight.data = solved.router.to(model.device)
    experts: Any = layer.get_submodule(facts.modules.experts)
    width = model.sizes["width"]
    slots: dict[Matrix, torch.Tensor] = {
        "gate": experts.gate_up_proj.data[:, :width],
        "up": experts.gate_up_proj.data[:, width:],
        "down": experts.down_proj.data,
    }
    at_once = 1 if model.device.type == "cpu" else INSTALLED_AT_ONCE
    for matrix in MATRICES:
        for first in range(0, model.sizes["experts"], at_once):
            part = slice(first, first + at_once)
            slots[matrix][part].copy_(dequantize(solved.codes[matrix][part], solved.scales[matrix][part]))
