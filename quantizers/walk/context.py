"""Context of a run: its work folder, device, process group and the places of its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.window import Parts, streamed
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.output.journal import Shard
from quantizers.output.uploads import Uploads, written_shard
from quantizers.planning.device_memory import Placement

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Context:
    """Nothing in it decides what a recipe means.

    Attributes:
        work: see `journal.work_folder`. That of the first machine holds the run; of other machines it holds files
            that are of no use once the processes have ended.
        placement: where activations are kept.
        check: called between steps; may raise to interrupt.
        window: bytes of a source on the Hub that lie on the disk at most; None for the default.
        uploads: of finished shards, in rank 0 alone; None where nothing is published as it is made.
    """

    work: Path
    device: torch.device
    placement: Placement
    check: Callable[[], None] = lambda: None
    dist: ProcessGroup = SINGLE_PROCESS
    window: int | None = None
    uploads: Uploads | None = None

    def streamed(self, source: Checkpoint, parts: Parts) -> contextlib.AbstractContextManager[Checkpoint]:
        """A source for one pass over these parts, see `window.streamed`."""
        return streamed(source, parts, self.work / "source", self.window, check=self.check, dist=self.dist)

    def upload(self, *shards: Shard) -> None:
        """Let finished shards be uploaded, if the run publishes as it goes."""
        for shard in shards:
            if self.uploads:
                self.uploads.put(written_shard(shard), self.check)
