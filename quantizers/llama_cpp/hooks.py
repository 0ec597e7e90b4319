"""The command and the function `imatrix`, and the file of `run --imatrix`; see `quantizers.hooks`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

    from quantizers.calibration.samples import CalibrationData
    from quantizers.planning.job import Job

FUNCTIONS = {"imatrix": "quantizers.llama_cpp.imatrix"}
SEVERAL = ("imatrix",)


def commands(app: Typer, calibration: Typer) -> None:
    """Add `imatrix`."""
    from .cli import imatrix

    app.command()(imatrix)


def refuse_imatrix(job: Job) -> None:
    """Raise an ArchitectureError if llama.cpp has no names for the matrices of the job's model."""
    from .imatrix_file import architecture_of

    architecture_of(job.facts)


def write_imatrix(path: Path, sums: Path, job: Job, data: CalibrationData) -> str:
    """Write the importance matrix of the sums that a run keeps in a folder; returns what is printed of it."""
    from .imatrix_file import imatrix_table, make_imatrix

    return imatrix_table(make_imatrix(path, sums, job.facts, job.config, data))
