"""`quantize bench`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from quantizers.system.errors import InputError

from .options import ASSUMED_DISK, DebugOption, DeviceMemoryOption, DeviceOption, DiskOption, JsonOption, emit

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure methods and machines.")

TINY = "tiny-minimax-m2-fp8-int4"
RecipeOption = Annotated[str, typer.Argument(metavar="RECIPE", help="source, calibration and held-out set")]
PictureOption = Annotated[Path | None, typer.Option(help="also draw the result into this file, such as out.png")]


def _job(recipe: str) -> Any:
    """The prepared job of a recipe that names a held-out set, with the number of threads set."""
    from quantizers.device.devices import use_threads
    from quantizers.plan.job import prepare

    job = prepare(recipe)
    use_threads(job.sizes)
    if job.recipe.verify is None or job.recipe.verify.perplexity is None:
        raise InputError(f"{recipe}: verify.perplexity.data is missing; the methods are measured on it")
    return job


@bench.command()
def methods(
    recipe: RecipeOption = TINY,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each method; seconds are the median")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="of the calibration set, about, taken evenly")] = 16384,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Nearest, llm-compressor's AWQ and ours on the same tokens in one process: KL, top-1, routing, seconds.

    Example: quantize bench methods tiny-minimax-m2-fp8-int4
    """
    from quantizers.device.devices import choose_device

    job = _job(recipe)
    from quantizers.bench.methods import compare_methods
    from quantizers.cli.tables.bench import methods_table

    result = compare_methods(job, choose_device(device), repeats, tokens)
    emit(result, as_json, methods_table(result))


@bench.command()
def compare(
    *,
    recipe: RecipeOption = TINY,
    experts: Annotated[int, typer.Option(min=2, help="of the random layer")] = 16,
    hidden: Annotated[int, typer.Option(min=128, help="of the random layer")] = 512,
    width: Annotated[int, typer.Option(min=32, help="of the random layer's experts")] = 256,
    tokens: Annotated[int, typer.Option(min=1, help="of the layer, and about as many of the calibration set")] = 16384,
    repeats: Annotated[int, typer.Option(min=1, help="seconds are the median")] = 3,
    picture: PictureOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Ours against llm-compressor's AWQ on one layer, and against its whole route on a model: time, memory, bytes, KL.

    Example: quantize bench compare tiny-minimax-m2-fp8-int4 --repeats 3
    """
    from quantizers.device.devices import choose_device

    job = _job(recipe)
    from quantizers.bench.compare import compare_with_library, layer_sizes
    from quantizers.cli.tables.bench import compare_table

    sizes = layer_sizes(experts, hidden, width)
    result = compare_with_library(job, sizes, tokens, tokens, repeats, choose_device(device))
    if picture:
        from quantizers.bench.pictures import compare_picture

        compare_picture(result, picture)
    emit(result, as_json, compare_table(result))


@bench.command()
def layer(
    *,
    like: Annotated[str, typer.Option(help="a model whose facts are kept here, such as minimax-m2.1")],
    tokens: Annotated[int, typer.Option(min=16, help="calibration tokens")] = 131072,
    length: Annotated[int, typer.Option(min=16, help="tokens of a sequence")] = 8192,
    experts: Annotated[int | None, typer.Option(min=8, help="fewer than the model has, for a small machine")] = None,
    device: DeviceOption = "auto",
    device_memory: DeviceMemoryOption = None,
    work: Annotated[Path | None, typer.Option(help="folder for temporary files")] = None,
    picture: PictureOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """One random layer of a model's real size through every phase: seconds, share of peak, time for all layers.

    Example: quantize bench layer --like minimax-m2.1 --experts 16 --tokens 2048
    """
    from quantizers.system.formatting import parse_bytes

    limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
    from quantizers.architectures.families import architecture_for
    from quantizers.architectures.sizes import sizes_of
    from quantizers.bench.layer import measure_layer
    from quantizers.bench.random_model import published
    from quantizers.device.devices import choose_device, use_threads

    config = published(like)
    use_threads(sizes_of(architecture_for(config, like), config, like))
    from quantizers.cli.tables.bench import layer_table

    result = measure_layer(like, tokens, experts, choose_device(device), length=length, limit=limit, work=work)
    if picture:
        from quantizers.bench.pictures import layer_picture

        layer_picture(result, picture)
    emit(result, as_json, layer_table(result))


def _numbers(text: str) -> list[int]:
    """The numbers of `--ranks`.

    Raises:
        InputError: it is something else.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"--ranks {text}: is not a list of numbers of processes; give them as 1,2,4,8")
    return [int(part) for part in parts]


@bench.command()
def count(
    *,
    like: Annotated[str, typer.Option(help="a model whose facts are kept here, such as minimax-m2.1")],
    tokens: Annotated[int, typer.Option(min=16, help="calibration tokens")] = 131072,
    length: Annotated[int, typer.Option(min=16, help="tokens of a sequence")] = 8192,
    experts: Annotated[int | None, typer.Option(min=2, help="fewer than the model has")] = None,
    card: Annotated[
        str | None,
        typer.Option(help="h100, h200, a100, rtx-pro-6000, 4090, or cpu: this machine; without it all cards"),
    ] = None,
    device_memory: DeviceMemoryOption = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="by so many processes, each with a card (h100 unless --card says another)"),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="with --ranks: cards of a machine, 8 if not given")] = None,
    disk: DiskOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """One layer of a model's real size, counted without a GPU: launches, bytes, arithmetic, waits, memory, seconds.

    With --ranks, what each of several processes does and passes on, and what they gain.

    Example: quantize bench count --like minimax-m2.1 --card h100 --ranks 1,2,4,8,16
    """
    from quantizers.system.formatting import parse_bytes

    limit = parse_bytes(device_memory, "--device-memory") if device_memory else None
    if ranks is not None:
        from quantizers.bench.ranks import count_ranks
        from quantizers.cli.tables.ranks import ranks_table

        result = count_ranks(
            like, tokens, _numbers(ranks), gpus=gpus or 8, length=min(length, tokens), experts=experts,
            card=card or "h100", limit=limit, disk=parse_bytes(disk or ASSUMED_DISK, "--disk"),
        )  # fmt: skip
        emit(result, as_json, ranks_table(result))
        return
    if gpus is not None or disk is not None:
        raise InputError("--gpus and --disk go with --ranks; say how many processes, as --ranks 1,2,4,8")
    from quantizers.bench.count import count_layer
    from quantizers.cli.tables.bench import count_table

    result = count_layer(like, tokens, length=min(length, tokens), experts=experts, card=card, limit=limit)
    emit(result, as_json, count_table(result))


@bench.command()
def scaling(
    *,
    hidden: Annotated[int, typer.Option(min=128, help="of the random layers")] = 128,
    width: Annotated[int, typer.Option(min=32, help="of their experts")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="seconds are the median")] = 3,
    picture: PictureOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """How cost grows with tokens, experts, grid points and layers: a table of seconds and fitted exponents.

    Example: quantize bench scaling --hidden 256 --width 128
    """
    import torch

    from quantizers.bench.scaling import measure_scaling
    from quantizers.cli.tables.bench import scaling_table
    from quantizers.device.devices import choose_device

    torch.set_num_threads(1)
    result = measure_scaling(hidden, width, repeats, choose_device(device))
    if picture:
        from quantizers.bench.pictures import scaling_picture

        scaling_picture(result, picture)
    emit(result, as_json, scaling_table(result))
