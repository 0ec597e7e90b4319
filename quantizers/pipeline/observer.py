"""A room's work on the source's layers while a run quantizes them, such as the sums of an importance matrix.

The core calls it with the calibration samples at each layer, and knows nothing else of it; see `quantizers.hooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.samples import CalibrationData
from quantizers.distributed.process_group import ProcessGroup
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.job import Job


class Observation(Protocol):
    """An observer's pass over the source's layers with the calibration samples."""

    def add_layer(self, layer: DecoderLayer) -> None:
        """Take the samples through the layer, with its experts' weights, and keep what is asked for."""

    def end(self) -> None:
        """After the last layer, finish."""


class Observer(Protocol):
    """A room's part in a run; its files are in a folder of its own, and an interrupted run resumes with them."""

    def refuse(self, job: Job) -> None:
        """Raise an InputError if it cannot work on the job's model."""

    def disk_bytes(self, facts: Architecture, tokens: int, itemsize: int) -> int:
        """Bytes that it writes for so many calibration tokens; `itemsize` is that of their states."""

    def is_done(self, folder: Path) -> bool:
        """Whether an earlier call has gone through all layers."""

    def begin(
        self,
        model: StreamedModel,
        sequences: Sequence[torch.Tensor],
        folder: Path,
        check: Callable[[], None],
        dist: ProcessGroup,
    ) -> Observation:
        """Begin or resume.

        Args:
            model: the source.
            sequences: token ids (T,) int64 of all samples, of which each process takes its share.
            folder: for its files.
            check: called between batches; may raise to interrupt.
        """

    def write(self, path: Path, folder: Path, job: Job, data: CalibrationData) -> str:
        """Write the result; returns what is printed of it."""
