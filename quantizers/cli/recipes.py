"""`quantize recipes` and `quantize new`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Context, Option, Typer

from . import common

recipes = Typer(rich_markup_mode=None)
NameArgument = Annotated[str, Argument(metavar="NAME", help="name from `quantize recipes`, or a model's Hub id")]


@recipes.callback(invoke_without_command=True)
def recipes_(context: Context, as_json: common.Json = False, debug: common.Debug = False) -> None:
    """List, show and copy the shipped recipes.

    Without a subcommand it lists them.

    Example: quantize recipes
    """
    if context.invoked_subcommand is None:
        list_recipes(as_json)


@recipes.command(name="list")
def list_recipes(as_json: common.Json = False, debug: common.Debug = False) -> None:
    """List the shipped recipes.

    Example: quantize recipes list --json
    """
    from quantizers.recipe.catalogue import rows
    from quantizers.system.formatting import text_table

    listed = rows()
    header = ("name", "source", "calibration", "experts")
    common.emit({"recipes": listed}, as_json, text_table(header, [[row[key] for key in header] for row in listed]))


@recipes.command()
def show(name: NameArgument, as_json: common.Json = False, debug: common.Debug = False) -> None:
    """Print a recipe.

    Example: quantize recipes show tiny-minimax-m2-fp8-int4
    """
    from quantizers.recipe.read import shipped_recipe

    text = shipped_recipe(name).read_text(encoding="utf-8")
    common.emit({"name": name, "text": text}, as_json, text.rstrip("\n"))


@recipes.command()
def schema(as_json: common.Json = False, debug: common.Debug = False) -> None:
    """Print the JSON schema of recipes, for an editor.

    Example: quantize recipes schema > recipe.schema.json
    """
    from quantizers.recipe.schema import Recipe
    from quantizers.system.schema import json_schema

    print(json_schema(Recipe, "Recipe of quantize"), end="")  # JSON in any case


@recipes.command()
def copy(
    name: NameArgument,
    file: Annotated[Path | None, Argument(metavar="FILE", help="file to write; NAME.yaml by default")] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Copy a recipe for editing; its paths are adapted to the new location.

    Example: quantize recipes copy tiny-minimax-m2-fp8-int4 mine.yaml
    """
    from quantizers.recipe.catalogue import copied
    from quantizers.recipe.read import shipped_recipe
    from quantizers.system.files import write_new

    path = file or Path(shipped_recipe(name).name)
    write_new({path: copied(name).encode()})
    common.emit({"recipe": str(path)}, as_json, f"wrote {path}; next: quantize plan {quote(str(path))}")


def new(
    model: Annotated[str, Argument(metavar="MODEL", help="Hub id of a model, or a folder")],
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="file to write; named after the model by default")
    ] = None,
    vram: Annotated[
        str | None, Option(metavar="GPUS", help="GPUs that will serve it, such as 4x3090: the largest experts that fit")
    ] = None,
    context: Annotated[
        int | None, Option(metavar="N", help="with --vram, context length; the model's maximum by default")
    ] = None,
    accept_quantized: Annotated[
        bool, Option("--accept-quantized", help="its experts may have 4 bits or fewer already")
    ] = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Write a commented recipe for a model, or for a model on your GPUs.

    Example: quantize new MiniMaxAI/MiniMax-M2.1 mine.yaml --vram 4x3090 --context 65536
    """
    from quantizers.architectures.families import architecture_for
    from quantizers.checkpoint.reader import CONFIG, open_folder, read_config
    from quantizers.commands.new import for_gpus
    from quantizers.formats.stored_matrices import architecture_of
    from quantizers.formats.unsupported import four_bit_keys, refuse_unquantizable
    from quantizers.recipe.catalogue import Chosen, new_recipe
    from quantizers.system.errors import InputError
    from quantizers.system.files import write_new

    if vram is None and context is not None:
        raise InputError("", "--context goes with --vram", "say which GPUs, as --vram 2x96GiB")
    folder = Path(model)
    if folder.is_dir():
        config, where = read_config(folder), str(folder / CONFIG)
        refuse_unquantizable(config, where, accepted=accept_quantized)
        if accept_quantized and not any(four_bit_keys(config)):
            problem = f"{where} shows no weights of 4 bits or fewer, so it has no effect"
            raise InputError("--accept-quantized", problem, "leave it out")
        if any(folder.glob("*.safetensors")):
            architecture_of(open_folder(folder))  # refuses a model that no recipe could quantize
        else:
            architecture_for(config, where)
    chosen = for_gpus(model, vram, context) if vram else Chosen()
    path = file or Path(f"{Path(model).name}-{vram or 'fp8-int4'}.yaml".lower().replace(" ", ""))
    write_new({path: new_recipe(model, chosen, accept_quantized=accept_quantized).encode()})
    common.emit({"recipe": str(path)}, as_json, f"wrote {path}; next: quantize plan {quote(str(path))}{chosen.asks}")
