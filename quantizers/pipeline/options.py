"""Execution settings of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.hooks import required

from .observer import Observer
from .publication import Destination


@dataclass(frozen=True)
class Options:
    """Execution settings of a run; none of them changes the meaning of a recipe.

    They are arguments of `quantizers.run`, but for `destination`: where the output is published as it is made; None to
    publish nothing.
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
    imatrix: bool = False
    window: int | None = None
    destination: Destination | None = None

    @property
    def imatrix_file(self) -> Path:
        """OUTPUT.imatrix.gguf."""
        return self.output.with_name(f"{self.output.name}.imatrix.gguf")

    def observer(self) -> Observer | None:
        """The observer that makes `imatrix_file`; None without `imatrix`.

        Raises:
            InputError: this installation has no such observer.
        """
        if not self.imatrix:
            return None
        observer: Observer = required("imatrix_of_run", "--imatrix")()
        return observer
