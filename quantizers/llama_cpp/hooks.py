"""The command and the function `imatrix`, and what `run --imatrix` does at each layer; see `quantizers.hooks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

    from quantizers.pipeline.observer import Observer

FUNCTIONS = {"imatrix": "quantizers.llama_cpp.imatrix"}
SEVERAL = ("imatrix",)


def commands(app: Typer, calibration: Typer) -> None:
    """Add `imatrix`: cli.py, and imatrix.py."""
    from . import cli

    app.command()(cli.imatrix)


def imatrix_of_run() -> Observer:
    """The importance matrix that `run --imatrix` makes at each layer of the source: during_run.py."""
    from . import during_run

    return during_run
