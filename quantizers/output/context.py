"""Where and how one process works on a run: what goes through every phase of it together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantizers.team.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Nothing in it decides what a recipe means.

    Attributes:
        work: the folder of the unfinished run, inside the output folder.
        device: where layers are computed.
        chunk: experts solved at a time.
        check: called between steps; may raise to interrupt.
        ranks: which process this is, of how many.
        states_in_files: whether calibration states lie in files, and not in memory.
    """

    work: Path
    device: torch.device
    chunk: int
    check: Callable[[], None] = lambda: None
    ranks: Ranks = ALONE
    states_in_files: bool = False
