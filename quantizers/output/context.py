"""Where and how one process works on a run: what goes through every phase of it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from quantizers.system.residents import Residents
from quantizers.team.team import ALONE, Team

if TYPE_CHECKING:
    import torch

Place = Literal["device", "memory", "files"]


@dataclass(frozen=True)
class Context:
    """Nothing in it decides what a recipe means.

    Attributes:
        work: see `journal.work_folder`. That of the first machine holds the run; of other machines it holds files
            that nobody reads again once the processes have ended.
        device: where layers are computed.
        residents: units of experts whose sums are held at a time.
        check: called between steps; may raise to interrupt.
        team: which process this is, of how many.
        inputs: where the inputs of the experts lie.
        states: where the calibration states between the layers lie.
        texts_there: whether the states of the held-out texts lie on the device, or only in their files.
        next_there: whether the next layer's bytes lie on the device while a layer is worked on.
    """

    work: Path
    device: torch.device
    residents: Residents
    check: Callable[[], None] = lambda: None
    team: Team = ALONE
    inputs: Place = "memory"
    states: Place = "memory"
    texts_there: bool = False
    next_there: bool = False
