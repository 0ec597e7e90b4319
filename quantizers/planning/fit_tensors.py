"""Facts that fit a checkpoint's tensors: the entries of the built-in ones, changed where they differ."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.safetensors_header import FLOATING, FP8

from .differences import LINEARS, MATRICES_OF_EXPERTS, Compared, Difference, Kind, part, shown

Values = MutableMapping[str, Any]  # facts as in YAML
SCALES = ("F32", "BF16")
NO_WORDS = None


def fit_known(values: Values, facts: Architecture, compared: Compared) -> Iterator[Difference]:
    """Change the entries of tensors that differ. The scales follow when the new facts are compared once more.

    Args:
        values: the facts as in YAML, which are changed.
        facts: the same, read.
    """
    for kind in compared.kinds:
        if kind.missing:
            written = _without(values, facts, kind) if not kind.found else NO_WORDS
            yield Difference("missing", kind.kind, shown([kind.expected]), _share(kind), written, kind.missing)
        if kind.shapes - {kind.expected.shape}:
            count = sum(n for spec, n in kind.numbers.items() if spec and spec.shape != kind.expected.shape)
            yield Difference(
                "shape", kind.kind, _shape(kind.expected.shape), _shapes(kind), _reshaped(values, kind), count
            )
        if kind.dtypes - {kind.expected.dtype}:
            count = sum(n for spec, n in kind.numbers.items() if spec and spec.dtype != kind.expected.dtype)
            found = ", ".join(sorted(kind.dtypes))
            yield Difference("dtype", kind.kind, kind.expected.dtype, found, _redtyped(values, kind), count)


def _without(values: Values, facts: Architecture, kind: Kind) -> str | None:
    """Take out the entry of tensors that are missing in every layer."""
    if kind.name == facts.head and values["asserts"].get("tie_word_embeddings"):
        values["head"] = facts.embedding
    elif kind.section == MATRICES_OF_EXPERTS or kind.name in (
        facts.norm.tensor, facts.router.tensor, facts.embedding, facts.final_norm, facts.head,
    ):  # fmt: skip
        return NO_WORDS
    del part(values, kind.section)[kind.name]
    smoothing, divided = values.get("smoothing", {}), values.get("tensor_parallel", {})
    for entries in (smoothing, *divided.values()):
        entries.pop(kind.name, None)
    for names in (values["norm"]["readers"], values["modules"].get("without", []), *smoothing.values()):
        if kind.name in names:
            names.remove(kind.name)
    return f"head: {facts.embedding}" if kind.name == facts.head else "taken out"


def _share(kind: Kind) -> str:
    return "nothing" if not kind.found else f"not in {kind.missing:,} of {kind.numbers.total():,}"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _shapes(kind: Kind) -> str:
    return ", ".join(sorted(map(_shape, kind.shapes)))


def _reshaped(values: Values, kind: Kind) -> str | None:
    """Write the shape in numbers, if it is one. The experts' follows from the sizes that the mathematics uses."""
    if len(kind.shapes) != 1 or kind.section == MATRICES_OF_EXPERTS:
        return NO_WORDS
    shape = list(next(iter(kind.shapes)))
    if kind.section[-1] == LINEARS:
        part(values, kind.section)[kind.name] = shape
    else:
        part(values, kind.section)[kind.name]["shape"] = shape
    return f"shape: {shape}"


def _redtyped(values: Values, kind: Kind) -> str | None:
    if kind.section == MATRICES_OF_EXPERTS or kind.section[-1] == LINEARS:
        return "each is read as it is" if kind.dtypes <= {FP8, *FLOATING} else NO_WORDS
    if not kind.dtypes <= set(FLOATING):
        return NO_WORDS
    if len(kind.dtypes) > 1:
        return "each is kept as it is"
    dtype = next(iter(kind.dtypes))
    part(values, kind.section)[kind.name]["dtype"] = dtype
    return f"dtype: {dtype}"


def fit_scales(values: Values, facts: Architecture, scales: list[Kind]) -> Iterator[Difference]:
    """Write the scales' dtype, which is one for all. Whatever else differs about them has no place in facts."""
    dtypes: set[str] = set()
    count = 0
    for kind in scales:
        if kind.missing:
            yield Difference("missing", kind.kind, shown([kind.expected]), _share(kind), NO_WORDS, kind.missing)
        if kind.shapes - {kind.expected.shape}:
            number = sum(n for spec, n in kind.numbers.items() if spec and spec.shape != kind.expected.shape)
            yield Difference("shape", kind.kind, _shape(kind.expected.shape), _shapes(kind), NO_WORDS, number)
        dtypes |= kind.dtypes
        count += sum(n for spec, n in kind.numbers.items() if spec and spec.dtype != facts.scale_dtype)
    if not dtypes - {facts.scale_dtype}:
        return
    written: str | None = "each is read as it is"
    if not dtypes <= set(SCALES):
        written = NO_WORDS
    elif len(dtypes) == 1:
        values["scale_dtype"] = next(iter(dtypes))
        written = f"scale_dtype: {values['scale_dtype']}"
    yield Difference(
        "scales", f"*.{scales[0].kind.rpartition('.')[2]}", facts.scale_dtype, ", ".join(sorted(dtypes)), written, count
    )
