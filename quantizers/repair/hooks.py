"""The command and the function `stitch`; see `quantizers.hooks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typer import Typer

FUNCTIONS = {"stitch_experts": "quantizers.repair.stitch"}


def commands(app: Typer, calibration: Typer) -> None:
    """Add `stitch`."""
    from .cli import stitch

    app.command()(stitch)
