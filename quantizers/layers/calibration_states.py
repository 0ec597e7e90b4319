"""The calibration states of one process: those between the layers, and the recorded inputs of a layer's experts.

They are kept on the device, in memory or in files that are overwritten in place, as the context says; nothing of them
needs to be durable, since they can be computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from quantizers.device.kind import accelerated
from quantizers.device.pinned import pin
from quantizers.forward.halves import attend, finish, observe
from quantizers.forward.lane import embed
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import recorded_rows
from quantizers.forward.states import Rows
from quantizers.output.context import Context, Place
from quantizers.plan.units import rows_of_block
from quantizers.team.shared_memory import shared_memory
from quantizers.team.team import ALONE, Team


class CalibrationStates:
    """States that go through the layers.

    Args:
        model: its structure, and the tensors outside the layers.
        context: where the work is done.
        lengths: calibration tokens of each sequence.

    Attributes:
        states: those between the layers; between a layer's halves, the residual stream.
        recorded: what the experts of the last layer were called with.
    """

    def __init__(self, model: LayeredModel, context: Context, lengths: Sequence[int]) -> None:
        self.model, self.context = model, context
        block = rows_of_block(accelerated(model.device))

        def rows(place: Place, name: str, width: int, dtype: torch.dtype, team: Team = ALONE) -> Rows:
            path = context.work / f"{name}.bin" if place == "files" else None
            device = model.device if place == "device" else None
            made = Rows(path, lengths, width, dtype, device, team=team, block=block)
            if place == "memory":
                pin(made.flat, model.device)
            return made

        own = "" if context.team.leads else f"-{context.team.rank}"
        self.states = rows(context.states, f"states{own}", model.sizes["hidden"], model.dtype, context.team)
        make = partial(rows, context.inputs)
        shared = context.team.several and context.inputs != "device"
        if shared:
            make = partial(rows_in_common, context, lengths)
        self.recorded = recorded_rows(make, model.sizes, model.dtype, shared=shared)

    def embed(self, tokens: Sequence[torch.Tensor] | None) -> None:
        """Fill the states that enter layer 0 from token ids (T,) int64, which rank 0 alone gives."""
        lengths = self.states.share.lengths
        together = torch.cat(list(tokens)) if tokens else torch.empty(sum(lengths), dtype=torch.int64)
        self.context.team.broadcast(together)
        embed(self.model, torch.split(together, lengths), self.states)

    def attend(self, layer: torch.nn.Module) -> None:
        """The first half of a layer."""
        attend(self.model, layer, self.states, self.states, self.context.check)

    def observe(self, layer: torch.nn.Module) -> None:
        """The first half of a layer with experts, and what these are called with."""
        observe(self.model, layer, self.states, self.recorded, self.context.check)

    def finish(self, number: int, layer: torch.nn.Module) -> None:
        """The second half.

        Raises:
            QuantizeError: an output is not finite.
        """
        finish(self.model, layer, self.states, f"layer {number}", self.context.check)

    def remove(self) -> None:
        """Remove the files, if there are any."""
        self.states.remove()
        if self.context.team.here.leads:
            self.recorded.remove()


def rows_in_common(context: Context, lengths: Sequence[int], name: str, width: int, dtype: torch.dtype) -> Rows:
    """Rows of all sequences that the processes of a machine have in common, in memory or in a file."""
    here, path = context.team.here, context.work / f"{name}.bin"
    if context.inputs == "files":
        return here.in_turn(lambda: Rows(path, lengths, width, dtype))
    with shared_memory(here, max(1, sum(lengths) * width * dtype.itemsize)) as memory:
        rows = Rows(memory, lengths, width, dtype)
    rows.path = None  # memory has nothing to be removed
    pin(rows.flat, context.device)
    return rows
