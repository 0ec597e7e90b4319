"""`quantize compare` and `quantize calibration why`: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from quantizers.cli import common
from quantizers.cli.adapter import Call, command

if TYPE_CHECKING:
    from quantizers.sets.compare import SetComparison


@command("quantizers.sets.compare:compare", before={"picture": "device", "no_picture": "device"})
def compare(
    call: Call,
    picture: Annotated[Path | None, Option(metavar="FILE", help="file for the plot; compare.png by default")] = None,
    no_picture: common.NoPicture = False,
) -> None:
    """Find out which calibration set gives the better output, whichever samples are drawn from it.

    The recipe's model is quantized with several draws of each set, in one pass over its source, and measured on the
    held-out texts; nothing is written. Intervals and verdicts cover both the draws and the texts.

    Example: quantize compare tiny-minimax-m2-fp8-int4 --calibration embedded --calibration mine.yaml --tokens 16384
    """
    from quantizers.sets.plots import sets_figure
    from quantizers.sets.tables import sets_table

    file = common.picture_file(picture, "compare.png", call.dist, unwanted=no_picture)
    _show(call, sets_table, sets_figure, file)


@command(
    "quantizers.sets.compare:why",
    rest="quantizers.sets.compare:_asked",
    before={"picture": "device", "no_picture": "device"},
)
def why(
    call: Call,
    picture: Annotated[Path | None, Option(metavar="FILE", help="file for the plot; why.png by default")] = None,
    no_picture: common.NoPicture = False,
) -> None:
    """Find out which sources of a set help, which hurt, and which make no difference.

    Each source is taken out of the same draws, and nothing takes its place; see `quantize compare`.

    Example: quantize calibration why embedded --tokens 16384
    """
    from quantizers.sets.plots import sources_figure
    from quantizers.sets.tables import sources_table

    file = common.picture_file(picture, "why.png", call.dist, unwanted=no_picture)
    _show(call, sources_table, sources_figure, file)


def _show(call: Call, table: Callable[..., str], figure: Callable[..., Any], picture: Path | None) -> None:
    """Print the result and draw the picture, in rank 0: the others have none."""
    compared: SetComparison = call()
    figures = compared.figures
    if figures:
        pictures = {picture: partial(figure, figures)} if picture else {}
        common.emit(figures, call.as_json, table(figures), pictures=pictures)
