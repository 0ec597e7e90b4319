"""`quantize calibration check` and `diff`: parse, call, print, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from quantizers.cli import common
from quantizers.cli.calibration import (
    RecipeOption,
    SetArgument,
    TokenizerOption,
    TrustOption,
    WithoutOption,
    WorkersOption,
    counting,
    one_of,
)
from quantizers.system.errors import InputError

if TYPE_CHECKING:
    from quantizers.recipe.schema import Recipe


def check(
    *,
    set_: Annotated[
        str | None,
        Argument(metavar="[SET]", help="a set's file, or the name of a shipped set; the set of --recipe by default"),
    ] = None,
    tokenizer: TokenizerOption = None,
    recipe: RecipeOption = None,
    trust_remote_code: TrustOption = False,
    held_out: Annotated[
        str | None,
        Option(
            metavar="SET",
            help="evaluation set that must share no text with it; by default the recipe's, or held-out.yaml beside it",
        ),
    ] = None,
    show: Annotated[int, Option(min=0, help="print this many rendered samples, evenly spread")] = 0,
    source: Annotated[
        str | None, Option(metavar="TEXT", help="with --show: only sources whose name contains this")
    ] = None,
    category: Annotated[
        str | None, Option(help="with --show: only this category, and those below it (code includes code/rust)")
    ] = None,
    without: WithoutOption = None,
    workers: WorkersOption = 8,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Check a set; exit 3 when a language has no text, or texts are duplicates, held out, or mislabelled.

    The verdict comes first. Warnings, such as many tokens cut, do not change the exit code.

    Example: quantize calibration check embedded --show 2 --category code/rust
    """
    from quantizers.sets.check import check_set, render

    if not show and (source is not None or category is not None):
        raise InputError("", "--source and --category choose what --show prints", "add --show N")
    tokenizing, about, given = counting(tokenizer, recipe, trust_remote_code)
    path, other = _sets(set_, held_out, given)
    left_out = without or (given[0].calibration_without if given and set_ is None else ())
    choice: dict[str, Any] = {"show": show, "source": source, "category": category}
    report = check_set(path, held_out=other, workers=workers, without=left_out, **choice, **tokenizing)
    common.emit(report, as_json, render(report, about), passed=report["ok"])


def diff(
    before: SetArgument,
    after: SetArgument,
    *,
    tokenizer: TokenizerOption = None,
    recipe: RecipeOption = None,
    trust_remote_code: TrustOption = False,
    files_only: Annotated[bool, Option("--yaml", help="compare only the YAML files, without loading data")] = False,
    workers: WorkersOption = 8,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Compare two sets: their files, and the texts and tokens that the second gains and loses.

    Example: quantize calibration diff embedded my-set.yaml
    """
    from quantizers.calibration.load_set import load_set
    from quantizers.recipe.read import find_set
    from quantizers.sets.diff import diff_sets, diff_texts, render_diff

    if files_only and (tokenizer or recipe or trust_remote_code):
        raise InputError("--yaml", "loads no data, so nothing is tokenized", "leave --tokenizer and --recipe out")
    paths = find_set(before), find_set(after)
    difference, texts = diff_sets(*paths), None
    if not files_only:
        one_of(tokenizer, recipe)
        tokenizing = counting(tokenizer, recipe, trust_remote_code)[0]
        old, new = (load_set(path, **tokenizing, workers=workers, require_languages=False) for path in paths)
        texts = diff_texts(old, new, tokenizing["tokenizer"])
    common.emit(difference | {"texts": texts}, as_json, render_diff(difference, texts))


def _sets(name: str | None, held_out: str | None, recipe: tuple[Recipe, Path] | None) -> tuple[Path, Path | None]:
    """The set to check, and the one that it must share no text with; None for the one beside it."""
    from quantizers.recipe.read import find_set, set_file

    if name is not None:
        path = find_set(name)
    elif recipe is not None:
        path = set_file(recipe[0].calibration_set, recipe[1])
    else:
        raise InputError("", "give a set, such as embedded, or --recipe RECIPE to check the set of a recipe")
    if held_out is not None:
        return path, find_set(held_out, "held-out")
    perplexity = recipe[0].verify.perplexity if recipe and recipe[0].verify else None
    if recipe is None or perplexity is None:
        return path, None
    other = set_file(perplexity.data, recipe[1])
    return path, None if other.samefile(path) else other
