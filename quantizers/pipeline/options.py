"""What a run is given besides its recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup


@dataclass(frozen=True)
class Options:
    """Where and how a run works; nothing here changes the meaning of a recipe.

    Attributes:
        output: the folder to write.
        device: where layers are computed.
        device_memory: bytes that may be used there, which decides how much is held there, and no byte of the output;
            None for what is free.
        paranoid: record the source's hashes; when the run resumes, compare them.
        with_data: copy the calibration sets' local data files into the output folder.
        states: where calibration states lie: in `memory`, in `files`, or on the device or in memory where they fit
            (`auto`).
        ignore_source_check: quantize a source that makes no sense of text, such as random weights.
        ignore_stop: continue after a layer whose figures are beyond the recipe's `verify.stop`.
        dist: the processes that share the run.
        command: what the user typed, from `quantize` on, to be named where the run is found unfinished.
    """

    output: Path
    device: torch.device
    device_memory: int | None = None
    paranoid: bool = False
    with_data: bool = False
    states: Literal["auto", "memory", "files"] = "auto"
    ignore_stop: bool = False
    ignore_source_check: bool = False
    dist: ProcessGroup = SINGLE_PROCESS
    command: tuple[str, ...] = ()
