"""`quantize calibration`: parse, call, print, exit code. Any other first word is a set to check."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option, Typer
from typer.core import TyperGroup

from quantizers.commands import options as opt
from quantizers.system.errors import InputError
from quantizers.system.files import write_new
from quantizers.system.formatting import text_table
from quantizers.system.shipped import shipped

from . import common
from .adapter import typer_option

if TYPE_CHECKING:
    from quantizers.recipe.schema import Recipe


class _SetOrCommand(TyperGroup):
    """A group in which `calibration SET` means `calibration check SET`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        if "check" in self.commands and args and args[0] not in self.commands and not own.issuperset(args):
            args = ["check", *args]
        return super().parse_args(ctx, args)


calibration = Typer(rich_markup_mode=None, cls=_SetOrCommand)
SetArgument = Annotated[str, Argument(metavar="SET", help="a set's file, or the name of a shipped set")]
TokenizerOption = Annotated[
    str | None, Option(help="a model's folder or Hub id; the recipe's, or else the tiny model, by default")
]
RecipeOption = Annotated[
    str | None, Option(metavar="RECIPE", help="count tokens with the tokenizer of this recipe's source")
]
WithoutOption = Annotated[list[str] | None, typer_option("without", opt.Without)]
TrustOption = Annotated[bool, typer_option("trust_remote_code", opt.TrustRemoteCode)]
WorkersOption = Annotated[int, Option(min=1, help="number of sources loaded at the same time")]


@calibration.callback(invoke_without_command=True)
def calibration_(context: Context, as_json: common.Json = False, debug: common.Debug = False) -> None:
    """Check, list, copy, write, pin, freeze and compare calibration sets.

    `quantize calibration SET` checks a set, as `check SET` does; without an argument, the shipped sets are listed.

    Example: quantize calibration embedded
    """
    if context.invoked_subcommand is None:
        list_sets(as_json)


@calibration.command(name="list")
def list_sets(as_json: common.Json = False, debug: common.Debug = False) -> None:
    """List the shipped sets: samples, sources and contents.

    Example: quantize calibration list
    """
    from quantizers.calibration.set_files import rows

    listed = rows()
    header = ("name", "samples", "sources", "about")
    common.emit({"sets": listed}, as_json, text_table(header, [[row[key] for key in header] for row in listed]))


@calibration.command()
def copy(
    name: Annotated[str, Argument(metavar="NAME", help="name from `quantize calibration list`")],
    folder: Annotated[
        Path, Argument(metavar="DIR", help="folder for the copy; created if needed, nothing is overwritten")
    ],
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Copy a shipped set for editing, with its data and its evaluation set.

    Example: quantize calibration copy embedded my-sets
    """
    from quantizers.calibration.set_files import copy_set

    copies = copy_set(name, folder)
    others = f", and {len(copies) - 1} files that go with it" if copies[1:] else ""
    files = {"set": str(copies[0]), "files": list(map(str, copies))}
    common.emit(files, as_json, f"wrote {copies[0]}{others}\n{_next(copies[0])}")


@calibration.command()
def new(
    file: Annotated[Path, Argument(metavar="FILE", help="file to write, such as mine.yaml")],
    data: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="your texts, .jsonl, .json or .parquet; without it, example rows are written beside the set",
        ),
    ] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Write a commented set for a file of texts, whose row format and columns are detected.

    Example: quantize calibration new mine.yaml --data texts.jsonl
    """
    from quantizers.calibration.set_files import new_set

    contents, notes = new_set(file, data)
    write_new(contents)
    lines = [f"wrote {' and '.join(map(str, contents))}", *notes, _next(file)]
    files = {"set": str(file), "files": list(map(str, contents)), "notes": notes}
    common.emit(files, as_json, "\n".join(lines))


@calibration.command()
def lock(
    set_: SetArgument,
    without: WithoutOption = None,
    workers: WorkersOption = 8,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Pin the exact version of every source in a lock file beside the set, which runs then use.

    Example: quantize calibration lock my-set.yaml
    """
    from quantizers.calibration.lock import lock_set
    from quantizers.recipe.read import find_set

    written, left_out = lock_set(find_set(set_), workers=workers, without=without or ())
    lines = [f"wrote {written}", *(f"without {name} ({reason})" for name, reason in left_out.items())]
    common.emit({"lock": str(written), "left_out": left_out}, as_json, "\n".join(lines))


@calibration.command()
def freeze(
    set_: SetArgument,
    folder: Annotated[
        Path, Argument(metavar="DIR", help="folder for the frozen set; created if needed, nothing is overwritten")
    ],
    *,
    tokenizer: TokenizerOption = None,
    recipe: RecipeOption = None,
    trust_remote_code: TrustOption = False,
    workers: WorkersOption = 8,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Write the rows that a set's samples are made of, and a set that reads them: without the Hub, the same samples.

    The tokenizer's chat template decides which rows are usable, so name the model that is to be calibrated.

    Example: quantize calibration freeze software-engineer frozen --recipe minimax-m2.1-fp8-int4
    """
    from quantizers.calibration.set_files import freeze_set
    from quantizers.recipe.read import find_set

    one_of(tokenizer, recipe)
    tokenizing = counting(tokenizer, recipe, trust_remote_code)[0]
    frozen = freeze_set(find_set(set_), folder, workers=workers, **tokenizing)
    files, restricted = frozen["files"], dict.fromkeys(frozen["non_commercial"])
    lines = [f"wrote {files[0]}: {frozen['rows']:,} rows of {len(files) - 2} sources, digest {frozen['digest']}"]
    if restricted:
        lines.append(f"not for commercial use: {', '.join(restricted)}; all licences: {files[-1]}")
    common.emit(frozen, as_json, "\n".join([*lines, _next(files[0])]))


@calibration.command()
def schema(as_json: common.Json = False, debug: common.Debug = False) -> None:
    """Print the JSON schema of calibration sets, for an editor.

    Example: quantize calibration schema > calibration-set.schema.json
    """
    from quantizers.calibration.set import CalibrationSet
    from quantizers.system.schema import json_schema

    print(json_schema(CalibrationSet, "Calibration set of quantize"), end="")  # JSON in any case


def one_of(tokenizer: str | None, recipe: str | None) -> None:
    """Refuse a recipe that nothing is taken from, since the tokenizer is named."""
    if tokenizer is not None and recipe is not None:
        raise InputError(f"--recipe {recipe}", "--tokenizer says what counts tokens", "give one of them")


def counting(
    tokenizer: str | None, recipe: str | None, trust_remote_code: bool
) -> tuple[dict[str, Any], str, tuple[Recipe, Path] | None]:
    """The tokenizer that counts tokens: the named one, else that of the recipe, else the tiny model's.

    Returns:
        It as the arguments of `load_set`, a note about it, and the recipe with its path.
    """
    from quantizers.recipe.read import read_recipe, source_location

    given = None if recipe is None else read_recipe(recipe)
    if tokenizer is not None:
        return {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}, "", given
    if given is None:
        about = "; a large model's makes fewer tokens of a text (--recipe RECIPE or --tokenizer MODEL counts with it)"
        return {"tokenizer": str(shipped("models") / "tiny-minimax-m2")}, about, None
    source = given[0].source
    trusted = trust_remote_code or source.trusts_tokenizer
    arguments = {"tokenizer": source_location(*given), "revision": source.revision, "trust_remote_code": trusted}
    return arguments, ", the recipe's source", given


def _next(path: str | Path) -> str:
    return f"next: quantize calibration {quote(str(path))}"
