"""What a run is told beside its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from quantizers.team.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Options:
    """Where and how a run works; nothing here decides what a recipe means.

    Attributes:
        output: the folder to write.
        device: where layers are computed.
        device_memory: bytes that may be used there, from which follows how many experts are solved at a
            time; None for what the device has.
        paranoid: keep the source's hashes, and compare them, and those of finished shards, when the run goes on.
        with_data: copy the calibration sets' local data files beside the checkpoint.
        ranks: which process this is, of how many that do the job together.
    """

    output: Path
    device: torch.device
    device_memory: int | None = None
    paranoid: bool = False
    with_data: bool = False
    ranks: Ranks = ALONE
