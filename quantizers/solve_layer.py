"""One layer from its inputs to its solved experts, with either engine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .engines import solve
from .layers import LayeredModel
from .recipe import Experts
from .rounding import dequantize
from .solved import MATRICES, Matrix, Solved
from .statistics import Recorded


@dataclass
class LayerStores:
    """Where a layer's recorded inputs are kept while it is solved: lists that may live in files.

    Attributes:
        x, chosen, weight: one entry a sequence, see `Recorded`.
    """

    x: Any
    chosen: Any
    weight: Any

    def recorded(self, device: torch.device) -> Sequence[Recorded]:
        """The sequences as the engine reads them, moved to the device one at a time."""
        return _OnDevice(self, device)


class _OnDevice(Sequence[Recorded]):
    def __init__(self, stores: LayerStores, device: torch.device) -> None:
        self.stores, self.device = stores, device

    def __len__(self) -> int:
        return len(self.stores.x)

    def __getitem__(self, index: int) -> Recorded:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
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
    chunk: int,
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
) -> tuple[Solved, dict[str, float]]:
    """Observe and solve one layer.

    Args:
        layer: materialised; left as it is.
        states: hidden states entering the layer, (T, H) each.
        stores: filled here.
        check: called between sequences; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).

    Returns:
        The solution, and seconds by phase: observe and solve.
    """
    facts = model.facts
    started = time.monotonic()
    for i in range(len(states)):
        seen = model.record(layer, states[i])
        stores.x[i], stores.chosen[i], stores.weight[i] = seen.x, seen.chosen, seen.weight
        check()
    observed = time.monotonic()
    norm = model.checkpoint.tensor(facts.layer(number, facts.fold.norm)).to(model.device)
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
        experts: Any = layer.get_submodule(facts.modules.experts)
        router: Any = layer.get_submodule(facts.modules.router)
        solved = solve(
            stores.recorded(model.device),
            experts.gate_up_proj.data,
            experts.down_proj.data,
            norm=norm,
            router=router.weight.data,
            activation=experts.act_fn,
            settings=settings,
            chunk=chunk,
        )
    return solved, {"observe": observed - started, "solve": time.monotonic() - observed}


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
    for matrix in MATRICES:
        for expert in range(model.sizes["experts"]):
            slots[matrix][expert].copy_(dequantize(solved.codes[matrix][expert], solved.scales[matrix][expert]))
