"""The scale that is folded into the norm: one for all of its readers, searched over all experts.

Legend: E experts, c experts of a unit, H hidden, P grid points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from quantizers.distributed.process_group import ProcessGroup
from quantizers.recipe.schema import Awq, Experts

from .awq import SEARCH_ROWS, grid_scales, row_step, scale_losses, weight_means
from .input_sums import InputSums, Unit

Rows = Callable[[Unit], torch.Tensor]


def norm_scale(
    gate_up: Callable[[Unit], torch.Tensor],
    inputs: InputSums,
    settings: Experts,
    units: Sequence[Unit],
    experts: int,
    *,
    within_memory: Callable[[Callable[[], torch.Tensor]], torch.Tensor],
    dist: ProcessGroup,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The scale (H,) that the norm, the router and every w1 and w3 share, before the norm is rounded.

    Args:
        gate_up: gives w1 above w3 of a unit, (c, 2I, H).
        units: this process's.
        experts: E.
        within_memory: calls a function again where memory was full, see `HeldSums`.

    Returns:
        The scale; and the objective before and after, two numbers on the device.
    """
    assert isinstance(settings.awq, Awq)
    group, bits, device = settings.group_size, settings.bits, inputs.gram.device

    def means(unit: Unit) -> torch.Tensor:
        return weight_means(gate_up(unit).float(), group)

    def losses(points: torch.Tensor, unit: Unit) -> torch.Tensor:
        rows = gate_up(unit)
        step = row_step(experts * rows.shape[1], SEARCH_ROWS)
        return scale_losses(rows[:, ::step].float(), inputs.gram.unsqueeze(0), points, group, bits).T * step  # (c, P)

    def of_all(rows: Rows) -> torch.Tensor:
        parts = [within_memory(partial(rows, unit)) for unit in units]
        return dist.all_gather({"rows": torch.cat(parts)} if parts else {}, device)["rows"]

    mean = of_all(means).mean(0, keepdim=True)
    grid = grid_scales(inputs.mean.unsqueeze(0), mean, settings.awq.grid, settings.awq.duo_scaling)
    total = of_all(partial(losses, grid)).double().sum(0)  # (P,), added in the order in which they are solved
    best = total.argmin().view(1)
    before, after = total[0], total.index_select(0, best)[0]
    return grid.index_select(0, best)[0, 0], {"norm_search_before": before, "norm_search_after": after}
