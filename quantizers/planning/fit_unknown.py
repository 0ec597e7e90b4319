"""Facts about the tensors of a checkpoint that no entry of the built-in facts names: they pass through.

Nobody has said what reads such a tensor, or what it reads. One of a layer with experts may read the norm before them.
So it is named in `norm.readers`, and nothing is folded until somebody who knows the model takes it out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.safetensors_header import FLOATING, FP8, Spec

from .differences import DENSE, EVERY, LINEARS, MOE, MTP, SCALE, TENSORS, Difference, part, shown
from .fit_sizes import numbered
from .plan import kind_of_tensor

KEPT = "kept"
ByLayer = Mapping[int, Spec]


def fit_unknown(
    values: MutableMapping[str, Any],
    facts: Architecture,
    sizes: Sizes,
    unknown: Mapping[str, Spec],
    block: tuple[int, int],
    mtp: Iterable[int] = (),
) -> tuple[list[Difference], list[str]]:
    """Write unknown tensors into the facts, with their shapes in numbers.

    Args:
        values: the facts as in YAML, which are changed.
        facts: the same, read.
        unknown: every unknown tensor.
        block: rows and columns of an FP8 block.
        mtp: the layers that predict further tokens, as far as the checkpoint has them.

    Returns:
        The differences, and the names in the facts of those that may read the norm.
    """
    written: dict[str, bool] = dict.fromkeys(unknown, False)
    suspects: list[str] = []
    further = frozenset(mtp)  # which have all that layers with experts have
    prefix, every = numbered(facts.layer_prefix, "layer"), frozenset(range(sizes["layers"])) | further
    within: dict[str, dict[int, Spec]] = {}
    for name, spec in unknown.items():
        place = prefix.match(name)
        if place and int(place[1]) in every:
            within.setdefault(name[place.end() :], {})[int(place[1])] = spec
    layers = ({sizes.dense: DENSE} if facts.dense_layer else {}) | ({further: MTP} if further else {})
    layers |= {every - sizes.dense: MOE, every: EVERY}
    entries = {name: specs for name, specs in within.items() if frozenset(specs) in layers}
    linears = {name for name in entries if _is_fp8_linear(name, entries, block)}
    of_linears = {name + SCALE for name in linears}
    for name, specs in entries.items():
        module, key, first = name.removesuffix(".weight"), layers[frozenset(specs)], next(iter(specs.values()))
        if name in linears:
            part(values, (key, LINEARS))[module] = list(first.shape)
            values["targets"]["fp8"].append(f".*{re.escape(module)}$")
            entry = module
        elif name in of_linears:
            entry = module
        elif not _is_plain(specs):
            continue
        else:
            part(values, (key, TENSORS))[name] = {"shape": list(first.shape), "dtype": first.dtype}
            if name.endswith(".weight") and len(first.shape) == 2:
                values["targets"]["ignore"].append(f"re:.*{re.escape(module)}$")
            entry = name
        written |= {facts.layer(layer, name): True for layer in specs}
        if name not in of_linears and key != MTP:  # with which nothing computes
            values["modules"].setdefault("without", []).append(entry)
            suspects += [entry] if key != DENSE else []  # where nothing is folded
    for name, spec in unknown.items():
        place = prefix.match(name)
        in_layer = place is not None and int(place[1]) in every
        in_entry = place is not None and in_layer and name[place.end() :] in entries
        if spec.dtype in FLOATING and not name.endswith(SCALE) and not in_entry:
            values["outside"][name] = {"shape": list(spec.shape), "dtype": spec.dtype}
            written[name] = True
            suspects += [name] if in_layer and place is not None and int(place[1]) not in further else []
    values["norm"]["readers"] += suspects
    return list(_differences(unknown, written)), suspects


def _is_fp8_linear(name: str, entries: Mapping[str, ByLayer], block: tuple[int, int]) -> bool:
    """Whether this is an FP8 matrix of one shape in its layers, with a scale for each block."""
    specs, scales = entries[name], entries.get(name + SCALE, {})
    if (
        not name.endswith(".weight")
        or specs.keys() != scales.keys()
        or {spec.dtype for spec in specs.values()} != {FP8}
    ):
        return False
    shapes = {spec.shape for spec in specs.values()}
    blocks = {tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=False)) for shape in shapes}
    return len(shapes) == 1 and len(next(iter(shapes))) == 2 and {scale.shape for scale in scales.values()} == blocks


def _is_plain(specs: ByLayer) -> bool:
    """Whether this tensor has one shape in its layers, and numbers that pass through."""
    return len({spec.shape for spec in specs.values()}) == 1 and {s.dtype for s in specs.values()} <= set(FLOATING)


def _differences(unknown: Mapping[str, Spec], written: Mapping[str, bool]) -> Iterator[Difference]:
    rows: Counter[tuple[str, Spec, bool]] = Counter()
    for name, spec in unknown.items():
        rows[kind_of_tensor(name), spec, written[name]] += 1
    for (kind, spec, kept), count in rows.items():
        yield Difference("unknown", kind, "nothing", shown([spec]), KEPT if kept else None, count)
