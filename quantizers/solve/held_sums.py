"""The sums of x that are held of the units that come next, as many as there is memory for.

Whatever finds the device's memory full is done again without them, and fewer are held from then on. Nothing that was
interrupted leaves a trace: all of it is computed again from what the experts were called with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from quantizers.device.malloc_tuning import release_free_memory
from quantizers.device.timing import phase
from quantizers.forward.recorded import Recorded
from quantizers.plan.device_memory import Residents

from .input_sums import InputSums, Unit, sweep
from .token_weights import Survey

Made = TypeVar("Made")


class HeldSums:
    """Of one layer.

    Args:
        blocks: what the MoE block saw.
        found: see `token_weights.survey`.
        hidden: H.
        residents: of how many units sums may be held.
    """

    def __init__(self, blocks: Sequence[Recorded], found: Survey, hidden: int, residents: Residents) -> None:
        self.blocks, self.found, self._hidden, self._residents = blocks, found, hidden, residents
        self._routed: dict[Unit, torch.Tensor] = {}

    def of_all(self, units: Sequence[Unit]) -> InputSums:
        """The sums over all rows, from a sweep that gathers those of the first units as well."""
        inputs = self._sweep(units, with_all=True)
        assert inputs is not None
        return inputs

    def take(self, waiting: Sequence[Unit]) -> torch.Tensor:
        """The sums (c, H, H) over the routed rows of the first of these units, not held any longer."""
        if waiting[0] not in self._routed:
            release_free_memory()  # otherwise memory that was freed sometimes adds to the peak of what comes next
            self._sweep(waiting, with_all=False)
        return self._routed.pop(waiting[0])

    def _sweep(self, waiting: Sequence[Unit], *, with_all: bool) -> InputSums | None:
        def gather() -> InputSums | None:
            units = waiting[: self._residents.share(len(waiting))]
            inputs, self._routed = sweep(self.blocks, self.found, units, self._hidden, with_all=with_all)
            return inputs

        with phase("sums"):
            return self.within_memory(gather)

    def within_memory(self, work: Callable[[], Made]) -> Made:
        """What `work` makes; where the device's memory is full, again without the sums that are held.

        Raises:
            QuantizeError: with the sums of one unit at a time the memory is too small as well.
        """
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # what `work` made so far is freed only when this block ends
            self._routed = {}
            self._residents.shrink()
            release_free_memory()
