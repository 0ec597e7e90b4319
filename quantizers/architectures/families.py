"""The families of which there is data: their files, the one that a config.json belongs to, and the published models.

Of such a model nothing is probed and no files are needed; what its files hold is compared when a plan is made.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from quantizers.system.errors import ArchitectureError
from quantizers.system.schema import load
from quantizers.system.strict_yaml import parse

from .architecture import Architecture, Facts, Family, Known, Published, Stored

FOLDER = Path(__file__).parent


def known() -> dict[str, Path]:
    """The known model types, with their YAML files."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


Own = Path | Architecture | None


def architecture_for(
    config: dict[str, Any], where: str, own: Own = None, tensors: Mapping[str, Stored] | None = None
) -> Architecture:
    """The facts for a config.json, whose path is `where`.

    Args:
        own: facts that are taken instead of any others, or a file of the user's own: facts, or data as the files here.
        tensors: the headers of its files, from which the facts of a model type without a file here are derived. Of one
            with a file they say whether a tied head is stored besides.

    Raises:
        ArchitectureError: config.json has no model type, or there are no facts for it; the user's file is wrong, or is
            about another model type; or no facts can be derived, see derive.py.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ArchitectureError(where, "model_type is missing", "give a transformers checkpoint")
    if isinstance(own, Architecture):
        return own
    given: Known | None = None
    if own is not None:
        given = load(own, Family if "roles" in parse(own, ArchitectureError)[0] else Architecture, ArchitectureError)
        if given.model_type != model_type:
            raise ArchitectureError(
                where,
                f"model_type is {reprlib.repr(model_type)}, but {own} holds the facts of {given.model_type!r}",
                "give the facts of this model",
            )
        if isinstance(given, Architecture):
            return given
    outside = frozenset(name for name in tensors or () if not any(map(str.isdecimal, name.split("."))))
    try:
        if isinstance(given, Family):
            return _laid_over(given, config, outside)
        if model_type in known():
            return _family_architecture(model_type, json.dumps(config), outside)
        if tensors is not None:
            from .derive import derived_architecture

            return derived_architecture(config, tensors)
    except ArchitectureError as failure:
        raise ArchitectureError(where, failure.without_remedy, failure.remedy) from None
    is_moe = any("expert" in key for key in config)
    reason = "no facts for this architecture" if is_moe else "not a mixture-of-experts model that is known here"
    raise ArchitectureError(
        where,
        f"model_type {model_type!r}: {reason}",
        f"give one of {', '.join(known())}, or facts of your own, as docs/how-to/add-a-family.md explains",
    )


@cache  # a command asks four times or more, and making the model takes longer than all else that it does with it
def _family_architecture(model_type: str, config: str, outside: frozenset[str]) -> Architecture:
    return _laid_over(family(model_type), json.loads(config), outside)


def _laid_over(family: Family, config: dict[str, Any], outside: frozenset[str]) -> Architecture:
    from .family_facts import family_architecture  # takes seconds: transformers is imported with it

    return family_architecture(family, config, outside)


@cache
def family(model_type: str) -> Family:
    """The data about a known family."""
    values = parse(FOLDER / f"{model_type}.yaml")[0]
    if "like" in values:
        values = _merged(parse(FOLDER / f"{values.pop('like')}.yaml")[0], values)
    return Family.model_validate(values)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` with what only `base` has, at any depth."""
    inner = {key for key in own if isinstance(own[key], dict) and isinstance(base.get(key), dict)}
    return {**base, **own, **{key: _merged(base[key], own[key]) for key in inner}}


def all_published() -> Iterator[tuple[Family, Published]]:
    """Every size of every family of which models are on the Hub, with its whole config.json."""
    for entry in map(family, known()):
        for size in entry.published:
            yield entry, size.model_copy(update={"config": _merged(entry.config, size.config)})


class _Size(Facts):
    models: list[str]
    config: dict[str, Any] = Field(default_factory=dict)


class _OfAType(Facts):
    """config.json of models of a type without a file about its family, published/*.yaml."""

    config: dict[str, Any]
    published: list[_Size]


@cache
def _configs() -> dict[str, dict[str, Any]]:
    """config.json of every model on the Hub of which it is kept."""
    kept = {model: size.config for _, size in all_published() for model in size.models}
    for path in sorted((FOLDER / "published").glob("*.yaml")):
        of_type = _OfAType.model_validate(parse(path)[0])
        kept |= {name: _merged(of_type.config, size.config) for size in of_type.published for name in size.models}
    return kept


def published_config(model: str) -> dict[str, Any] | None:
    """config.json kept here for a model on the Hub, to plan without a network; None for other models."""
    return _configs().get(model)


def published_models() -> list[str]:
    """Every model on the Hub whose config.json we keep."""
    return list(_configs())
