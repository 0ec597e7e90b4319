"""Commands and functions about calibration sets; see `quantizers.hooks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

FUNCTIONS = {"compare": "quantizers.sets.compare", "coverage": "quantizers.sets.coverage"}
SEVERAL = ("coverage", "compare", "calibration why")


def commands(app: Typer, calibration: Typer) -> None:
    """Add `coverage`, `compare`, and `calibration` `check`, `diff` and `why`."""
    from .cli.calibration import check, diff
    from .cli.compare import compare, why
    from .cli.coverage import coverage

    app.command()(coverage)
    app.command()(compare)
    calibration.command()(check)
    calibration.command()(diff)
    calibration.command()(why)
