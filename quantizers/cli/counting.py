"""Whose tokenizer counts a set's tokens: the one that is named, a recipe's, or the tiny model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from quantizers.recipe.schema import Recipe

TokenizerOption = Annotated[
    str | None, typer.Option(help="a model's folder or Hub id; the recipe's, or else the tiny model, by default")
]
RecipeOption = Annotated[
    str | None, typer.Option(metavar="RECIPE", help="count tokens with the tokenizer of this recipe's source")
]


@dataclass(frozen=True)
class Counting:
    """Whose tokenizer counts the tokens, and what is said about that.

    Attributes:
        arguments: tokenizer, revision and trust_remote_code, as `load_samples` takes them.
        recipe: the recipe that was given, with its path.
    """

    arguments: dict[str, Any]
    about: str
    recipe: tuple[Recipe, Path] | None


def counting_of(tokenizer: str | None, recipe: str | None, trust_remote_code: bool = False) -> Counting:
    """The tokenizer that was named, or the recipe's, or the tiny model's.

    Args:
        trust_remote_code: whether it may run code of its own; a recipe can allow that for its own model too.
    """
    from quantizers.recipe.locations import source_location
    from quantizers.recipe.schema import read_recipe
    from quantizers.system.shipped import shipped

    named = None if recipe is None else read_recipe(recipe)
    if tokenizer is not None:
        return Counting({"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}, "", named)
    if named is None:
        tiny = {"tokenizer": str(shipped("models") / "tiny-minimax-m2")}
        about = "; a large model's makes fewer tokens of a text (--recipe RECIPE or --tokenizer MODEL counts with it)"
        return Counting(tiny, about, None)
    source = named[0].source
    trusted = trust_remote_code or source.trusts_tokenizer
    arguments = {"revision": source.revision, "trust_remote_code": trusted}
    return Counting({"tokenizer": source_location(*named)} | arguments, ", the recipe's source", named)
