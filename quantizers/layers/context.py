"""Context of a run: its work folder, device, process group and the places of its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.planning.device_memory import Place, Residents

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Nothing in it decides what a recipe means.

    Attributes:
        work: see `journal.work_folder`. That of the first machine holds the run; of other machines it holds files
            that are of no use once the processes have ended.
        residents: expert batches whose Hessians are kept at a time.
        check: called between steps; may raise to interrupt.
        dist: which process this is, of how many.
        inputs: where the captured MoE inputs are kept.
        states: where the calibration activations between layers are kept.
        texts_on_device: whether the held-out activations are kept on the device, or only in their files.
        prefetch_to_device: whether the next layer's bytes are prefetched to the device.
    """

    work: Path
    device: torch.device
    residents: Residents
    check: Callable[[], None] = lambda: None
    dist: ProcessGroup = SINGLE_PROCESS
    inputs: Place = "memory"
    states: Place = "memory"
    texts_on_device: bool = False
    prefetch_to_device: bool = False
