"""The sizes that a config.json does not give under the keys of the built-in facts: read from the headers.

A size is known if it is counted (layers, experts) or if it alone is unknown in some tensor's shape: a matrix of
`heads * head_dim` rows says head_dim once the number of heads is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.facts import SizeFacts
from quantizers.architectures.families import known_facts
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.system.errors import CheckpointError


def fit_sizes(
    facts: Architecture, config: Mapping[str, Any], tensors: Mapping[str, Spec], where: str
) -> dict[str, SizeFacts]:
    """What the facts must say about the sizes whose keys config.json lacks, where that is something else.

    In this order: another family's key that config.json has, an expression that holds, a number.

    Args:
        config: config.json.
        tensors: every header.
        where: the checkpoint's name, for the message.

    Raises:
        CheckpointError: a size is in neither config.json nor the headers; one line with all of them.
    """
    sizes = {name: config[size.key] for name, size in facts.sizes.items() if type(config.get(size.key)) is int}
    lacking = [name for name, size in facts.sizes.items() if not config.get(size.key)]
    sizes |= {name: count for name, count in _counted(facts, tensors).items() if name in lacking and count}
    _solve(facts, tensors, sizes)
    fitted: dict[str, SizeFacts] = {}
    unknown = []
    for name in lacking:
        size = facts.sizes[name]
        key = _other_key(name, config, sizes.get(name))
        if key is not None:
            fitted[name] = SizeFacts(key=key)
        elif name in sizes:
            candidates = (size.otherwise, "hidden / heads", str(sizes[name]))
            holds = next(term for term in candidates if term and _value(term, sizes) == sizes[name])
            fitted[name] = SizeFacts(key=size.key, otherwise=holds)
        elif size.otherwise is None:
            unknown.append(f"{size.key} ({name})")
    if unknown:
        raise CheckpointError(
            f"{where}: config.json has no {', '.join(unknown)}, and the headers do not say it; add it to config.json, "
            "or name another family with --like"
        )
    return {name: size for name, size in fitted.items() if size != facts.sizes[name]}


def _counted(facts: Architecture, tensors: Mapping[str, Spec]) -> dict[str, int]:
    """The numbers of layers, without those that predict further tokens, and of experts in the tensors' names."""
    layer = numbered(facts.layer_prefix, "layer")
    expert = re.compile(layer.pattern + numbered(facts.expert_prefix, "expert").pattern)
    counts = {}
    for name, pattern, group in (("layers", layer, 1), ("experts", expert, 2)):
        counts[name] = max((int(found[group]) + 1 for found in map(pattern.match, tensors) if found), default=0)
    if facts.mtp_layer:
        only = {*facts.mtp_layer.tensors, *(f"{name}.weight" for name in facts.mtp_layer.linears)}
        places = ((layer.match(name), name) for name in tensors)
        counts["layers"] -= len({found[1] for found, name in places if found and name[found.end() :] in only})
    return counts


def numbered(prefix: str, word: str) -> re.Pattern[str]:
    """A pattern for names that begin with `prefix`, in which `{word}` is a number, its only group."""
    return re.compile(re.escape(prefix).replace(re.escape(f"{{{word}}}"), r"(\d+)"))


def _solve(facts: Architecture, tensors: Mapping[str, Spec], sizes: dict[str, int]) -> None:
    """Add to `sizes` what follows from the shapes, as long as something follows."""
    shapes = [
        (term, number)
        for terms, shape in _shapes(facts, tensors, sizes.get("layers", 0))
        for term, number in zip(terms, shape, strict=False)
    ]
    found = True
    while found:
        found = False
        for term, number in shapes:
            unknown = {word for word in re.findall(r"\w+", term) if not word.isdigit() and word not in sizes}
            if len(unknown) == 1:
                (word,) = unknown
                solved = _solved(term, word, number, sizes)
                if solved is not None:
                    sizes[word], found = solved, True


def _solved(term: str, word: str, number: int, sizes: Mapping[str, int]) -> int | None:
    # A term is linear in a size, unless it divides by it or has it twice: then the last line refuses it.
    one, two = (_value(term, {**sizes, word: n}) for n in (1, 2))
    if one is None or two is None or two <= one or (number - one) % (two - one):
        return None
    solved = 1 + (number - one) // (two - one)
    return solved if solved > 0 and _value(term, {**sizes, word: solved}) == number else None


def _value(term: str, sizes: Mapping[str, int]) -> int | None:
    try:
        return Sizes(sizes).value(term)
    except (KeyError, ValueError):
        return None


def _shapes(
    facts: Architecture, tensors: Mapping[str, Spec], layers: int
) -> Iterator[tuple[list[str], tuple[int, ...]]]:
    """Every kind of tensor's shape in the facts, and that of the first such tensor."""
    for name, tensor in facts.outside.items():
        if name in tensors:
            yield tensor.shape, tensors[name].shape
    in_layer: dict[str, list[str]] = {}
    for dense in (True, False):
        in_layer |= {name: tensor.shape for name, tensor in facts.tensors(dense).items()}
        in_layer |= {f"{name}.weight": shape for name, shape in facts.linears(dense).items()}
    for matrix in MATRICES:
        linear = facts.expert_linears[matrix]
        in_layer[f"{facts.expert_prefix.format(expert=0)}{linear.name}.weight"] = linear.shape
    for name, terms in in_layer.items():
        first = next((full for n in range(layers) if (full := facts.layer(n, name)) in tensors), None)
        if first is not None:
            yield terms, tensors[first].shape


def _other_key(name: str, config: Mapping[str, Any], value: int | None) -> str | None:
    """The key under which another family's config.json has this size, if this one has it too, and not another value."""
    keys = dict.fromkeys(facts.sizes[name].key for facts in known_facts() if name in facts.sizes)
    fitting = (key for key in keys if type(config.get(key)) is int and value in (None, config[key]))
    return next(fitting, None)
