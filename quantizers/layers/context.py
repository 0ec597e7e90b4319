"""Context of a run: its work folder, device, process group and the places of its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.window import Parts, streamed
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.output.uploads import Uploads, written_shard
from quantizers.planning.device_memory import Place, Residents

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Nothing in it decides what a recipe means.

    Attributes:
        work: see `journal.work_folder`. That of the first machine holds the run; of other machines it holds files
            that are of no use once the processes have ended.
        check: called between steps; may raise to interrupt.
    """

    work: Path
    device: torch.device
    residents: Residents
    check: Callable[[], None] = lambda: None
    dist: ProcessGroup = SINGLE_PROCESS
    inputs: Place = "memory"  # captured MoE inputs
    states: Place = "memory"  # calibration activations between layers
    texts_on_device: bool = False  # held-out activations; else only in their files
    prefetch_to_device: bool = False  # the next layer's bytes
    window: int | None = None  # bytes of a source on the Hub that lie on the disk at most; None for the default
    uploads: Uploads | None = None  # of finished shards, by rank 0 alone

    def streamed(self, source: Checkpoint, parts: Parts) -> contextlib.AbstractContextManager[Checkpoint]:
        """A source for one pass over these parts, see `window.streamed`."""
        return streamed(source, parts, self.work / "source", self.window, check=self.check, dist=self.dist)

    def upload(self, *entries: Mapping[str, Any]) -> None:
        """Let the shards of journal entries be uploaded, if the run publishes as it goes."""
        for entry in entries:
            if self.uploads:
                self.uploads.put(written_shard(entry["shard"], entry["digest"]), self.check)
