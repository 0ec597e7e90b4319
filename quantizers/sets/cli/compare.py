"""`quantize compare` and `quantize calibration why`: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Context, Option

from quantizers.cli import common

Draws = Annotated[int, Option(min=1, help="of each set; draw n is the set with its seed increased by n")]
Tokens = Annotated[
    int | None, Option(min=1, help="calibration tokens of a draw; the recipe's, or else the whole set, by default")
]
Layers = Annotated[
    str | None,
    Option(metavar="first:N", help="quantize the first N layers alone, which is quicker; the others are the source's"),
]
Data = Annotated[str | None, Option(metavar="SET", help="held-out set; the recipe's by default")]
Work = Annotated[
    Path | None,
    Option(metavar="DIR", help="folder for states and a journal; an interrupted comparison resumes from it"),
]


def compare(
    *,
    context: Context,
    recipe: common.Recipe,
    sets: Annotated[
        list[str],
        Option(
            "--calibration", metavar="SET", help="a calibration set: a file, or the name of a shipped one; two or more"
        ),
    ],
    draws: Draws = 5,
    at_most: Annotated[
        int | None,
        Option(min=1, help="while a pair of sets is undecided, draw as many again, up to these; keeps the error rate"),
    ] = None,
    tokens: Tokens = None,
    layers: Layers = None,
    data: Data = None,
    source: common.Source = None,
    settings: common.Settings = None,
    picture: Annotated[Path, Option(metavar="FILE", help="file for the plot")] = Path("compare.png"),
    no_picture: common.NoPicture = False,
    device: common.Device = "auto",
    device_memory: common.DeviceMemory = None,
    work: Work = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Find out which calibration set gives the better output, whichever samples are drawn from it.

    The recipe's model is quantized with several draws of each set, in one pass over its source, and measured on the
    held-out texts; nothing is written. Intervals and verdicts cover both the draws and the texts.

    Example: quantize compare tiny-minimax-m2-fp8-int4 --calibration embedded --calibration mine.yaml --tokens 16384
    """
    from quantizers.sets.compare import compare as compare_sets
    from quantizers.sets.plots import sets_figure
    from quantizers.sets.tables import sets_table

    found = compare_sets(**common.given(context), dist=context.obj).figures
    _show(found, sets_table, sets_figure, None if no_picture else picture, as_json)


def why(
    *,
    context: Context,
    set_: Annotated[str, Argument(metavar="SET", help="a set's file, or the name of a shipped set")],
    recipe: Annotated[
        str, Option(metavar="RECIPE", help="recipe whose source, experts and held-out set are used")
    ] = "tiny-minimax-m2-fp8-int4",
    draws: Draws = 5,
    tokens: Tokens = None,
    layers: Layers = None,
    data: Data = None,
    source: common.Source = None,
    settings: common.Settings = None,
    picture: Annotated[Path, Option(metavar="FILE", help="file for the plot")] = Path("why.png"),
    no_picture: common.NoPicture = False,
    device: common.Device = "auto",
    device_memory: common.DeviceMemory = None,
    work: Work = None,
    trust_remote_code: common.TrustRemoteCode = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Find out which sources of a set help, which hurt, and which make no difference.

    Each source is taken out of the same draws, and nothing takes its place; see `quantize compare`.

    Example: quantize calibration why embedded --tokens 16384
    """
    from quantizers.sets.compare import why as effects_of_sources
    from quantizers.sets.plots import sources_figure
    from quantizers.sets.tables import sources_table

    found = effects_of_sources(**common.given(context), dist=context.obj).figures
    _show(found, sources_table, sources_figure, None if no_picture else picture, as_json)


def _show(
    found: dict[str, Any], table: Callable[..., str], figure: Callable[..., Any], picture: Path | None, as_json: bool
) -> None:
    """Print what was found and draw the picture, in rank 0: the others found nothing."""
    from quantizers.eval.report.plots import save

    if not found:
        return
    text = table(found)
    if picture:
        save(figure(found), picture)
        text += f"\n\npicture: {picture}"
    common.emit(found, as_json, text)
