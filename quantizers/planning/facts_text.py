"""The text of a facts file: YAML with a comment above every entry that differs from the built-in facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.checkpoint.safetensors_header import printed
from quantizers.system.errors import CheckpointError
from quantizers.system.strict_yaml import MAX_BYTES, dump

from .differences import DENSE, EVERY, LINEARS, MOE, MTP, OUTSIDE, TENSORS, Section
from .fit_facts import Fitted

# Depth of the keys that have a line each; all others, and everything deeper, are written in one line.
DEPTHS = dict.fromkeys(("sizes", "asserts", "outside", "expert_linears", "modules", "targets", "servers"), 1)
DEPTHS |= dict.fromkeys((EVERY, MOE, DENSE, MTP), 2)
UNKNOWN = [*((layer, kind) for layer in (EVERY, MOE) for kind in (LINEARS, TENSORS)), OUTSIDE]  # where such tensors are


def facts_text(fitted: Fitted, model: str) -> str:
    """The text of a facts file.

    Args:
        model: the checkpoint's name, for the first line.

    Raises:
        CheckpointError: so many tensors are unknown that the file would be larger than is read again.
    """
    head = (
        f"# Facts about {printed(model)}, made by `quantize new --facts` from those kept for {fitted.family}, its",
        "# config.json and its headers. The keys are explained in quantizers/architectures/minimax_m2.yaml.",
    )
    comments = _comments(fitted)
    lines = (line for key, value in fitted.values.items() for line in _lines((key,), value, comments))
    text = "\n".join([*head, *lines]) + "\n"
    if len(text.encode()) > MAX_BYTES:
        raise CheckpointError(
            f"{printed(model)}: facts about all its unknown tensors are larger than {MAX_BYTES:,} bytes; it is too "
            f"unlike {fitted.family}, name another family with --like"
        )
    return text


def _comments(fitted: Fitted) -> dict[tuple[str, ...], str]:
    """The comment above an entry, by its path of keys."""
    comments: dict[tuple[str, ...], str] = {}
    for name in fitted.suspects:
        section = next(one for one in UNKNOWN if name in _entries(fitted.values, one))
        comments[*section, name] = (
            f"unknown: unless it reads {fitted.values['norm']['tensor']}, take it out of norm.readers"
        )
    computed = f"transformers' {printed(fitted.values['model_class'])} must compute this too"
    for one in fitted.differences:
        if one.what == "assert":
            comments["asserts", one.name] = f"the kept facts rely on {one.kept}; {computed}"
        elif one.what == "size" and one.written is not None:
            comments["sizes", one.written.partition(":")[0]] = f"config.json has no {one.name}"
    return comments


def _entries(values: Mapping[str, Any], section: Section) -> Mapping[str, Any]:
    for key in section:
        values = values.get(key, {})
    return values


def _lines(
    place: tuple[str, ...], value: Any, comments: Mapping[tuple[str, ...], str], depth: int | None = None
) -> Iterator[str]:
    """The lines of one key, with the comments that stand above it and above those in it."""
    indent = "  " * (len(place) - 1)
    depth = DEPTHS.get(place[0], 0) if depth is None else depth
    if place in comments:
        yield f"{indent}# {comments[place]}"
    if depth and isinstance(value, dict) and value:
        yield f"{indent}{place[-1]}:"
        for name, inner in value.items():
            yield from _lines((*place, name), inner, comments, depth - 1)
    else:
        yield indent + dump({place[-1]: value}, width=MAX_BYTES, flow=True).strip()[1:-1]
