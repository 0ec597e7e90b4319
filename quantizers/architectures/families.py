"""The families that are known: their files, the one that a config.json belongs to, and the models that are published.

A model type without a YAML file is refused unless the user gives a file, and so is a config.json that contradicts its
file (sizes.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quantizers.system.errors import ArchitectureError
from quantizers.system.schema import load

from .architecture import Architecture
from .facts import Published, Stored

FOLDER = Path(__file__).parent


def known() -> dict[str, Path]:
    """The known model types, with their YAML files."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


Own = Path | Architecture | None


def architecture_for(
    config: dict[str, Any], where: str, own: Own = None, tensors: Mapping[str, Stored] | None = None
) -> Architecture:
    """The facts for a config.json, without the tensors that a model with it does not have.

    Args:
        config: config.json.
        where: its path, for the message.
        own: facts that are taken instead of any kept ones, or a file with such of the user's own.
        tensors: the headers of its files, from which the facts of a model type without a file here are derived.

    Raises:
        ArchitectureError: config.json has no model type, or there are no facts for it; the user's file is wrong, or is
            about another model type; or no facts can be derived, see `derived_architecture`.
    """
    model_type = config.get("model_type")
    files = known()
    if not isinstance(model_type, str):
        raise ArchitectureError(f"{where}: model_type is missing; give a transformers checkpoint")
    if isinstance(own, Architecture):
        return own
    if own is not None:
        facts = load(own, Architecture, ArchitectureError)
        if facts.model_type != model_type:
            raise ArchitectureError(
                f"{where}: model_type is {reprlib.repr(model_type)}, but {own} holds the facts of "
                f"{facts.model_type!r}; give the facts of this model"
            )
        return facts.of_model(config)
    if model_type not in files and tensors is not None:
        from .derive import derived_architecture

        return derived_architecture(config, tensors, where)
    if model_type not in files:
        is_moe = any("expert" in key for key in config)
        reason = "no facts for this architecture" if is_moe else "not a mixture-of-experts model that is known here"
        raise ArchitectureError(
            f"{where}: model_type {model_type!r}: {reason}; give one of {', '.join(files)}, or facts of your own, "
            "as docs/add-a-family.md explains"
        )
    return _facts(files[model_type]).of_model(config)


@cache
def _facts(file: Path) -> Architecture:
    # A command asks four times or more, and reading the file takes longer than all else that it does with it.
    return load(file, Architecture, ArchitectureError)


def all_published() -> Iterator[tuple[Architecture, Published]]:
    """Every size of every family of which models are on the Hub."""
    for facts in map(_facts, known().values()):
        yield from ((facts, published) for published in facts.published)


def published_config(model: str) -> tuple[Architecture, dict[str, Any]] | None:
    """Facts and config.json kept here for a model on the Hub, to plan without a network; None for other models."""
    return next(
        ((facts.of_model(one.config), one.config) for facts, one in all_published() if model in one.models), None
    )


def published_models() -> list[str]:
    """Every model on the Hub whose config.json we keep."""
    return [model for _, published in all_published() for model in published.models]
