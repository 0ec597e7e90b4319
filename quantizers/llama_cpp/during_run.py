"""The importance matrix that a run makes on its way through the source: an `Observer`, see pipeline/observer.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.samples import CalibrationData
from quantizers.distributed.process_group import ProcessGroup
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.job import Job

from .imatrix_file import architecture_of, imatrix_table, make_imatrix
from .input_sums import InputSums, bytes_of_sums, sums_file


def refuse(job: Job) -> None:
    """Raise an ArchitectureError if llama.cpp has no names for the matrices of the job's model."""
    architecture_of(job.facts)


def disk_bytes(facts: Architecture, tokens: int, itemsize: int) -> int:
    """Bytes of the sums of so many calibration tokens, and of the file made of them."""
    return bytes_of_sums(facts, tokens, itemsize)


def is_done(folder: Path) -> bool:
    """Whether an earlier call has gone through all layers: the sums of the head come last."""
    return sums_file(folder, None).exists()


def begin(
    model: StreamedModel,
    sequences: Sequence[torch.Tensor],
    folder: Path,
    check: Callable[[], None],
    dist: ProcessGroup,
) -> InputSums:
    """Sums of the squares of what the source's matrices read of the sequences."""
    return InputSums(model, sequences, folder, "both", check=check, dist=dist)


def write(path: Path, folder: Path, job: Job, data: CalibrationData) -> str:
    """Write the importance matrix of the sums in a folder; returns what is printed of it."""
    return imatrix_table(make_imatrix(path, folder, job.facts, job.config, data))
