"""What is known about a model family: the schema of architectures/*.yaml, and what its facts say of a layer.

The differences between families are data: names, shapes, which tensors read a norm's output, where the router is and
what its servers are told. facts.py has the parts, families.py finds the file of a model, sizes.py checks a config.json
against it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from quantizers.system.formatting import ranges
from quantizers.system.strict_yaml import dump

from .facts import (
    DenseFacts,
    Facts,
    HandedFacts,
    KindFacts,
    KvCacheFacts,
    LayerFacts,
    LinearFacts,
    Modules,
    MtpFacts,
    NormFacts,
    Published,
    RouterFacts,
    ServerFacts,
    ServerName,
    SizeFacts,
    Targets,
    TensorFacts,
    TensorParallelFacts,
)
from .matrices import Matrix

# A sum of products of sizes and numbers, worked out from left to right: "heads * head_dim", "hidden / heads".
EXPRESSION = re.compile(r"\s*\w+(\s*[*/+]\s*\w+)*\s*")
NEEDED = ("layers", "experts", "chosen", "hidden", "width", "vocabulary", "heads")
ROUTER, EXPERTS = "router", "experts"  # as readers of a norm
SECTION_KEYS = ["scale_fmt"]  # for a family whose servers are not known: vLLM reads it of every model


def _size(value: Any) -> Any:
    return {"key": value} if isinstance(value, str) else value


class Architecture(Facts):
    """One model family. See architectures/minimax_m2.yaml for the meaning of each key."""

    model_type: str
    model_class: str
    sizes: dict[str, Annotated[SizeFacts, BeforeValidator(_size)]]
    asserts: dict[str, Any]
    rotary_dim_key: str | None = None
    outside: dict[str, TensorFacts]
    embedding: str
    head: str
    unread: list[str] = Field(default_factory=list)
    layer_prefix: str
    every_layer: LayerFacts = LayerFacts()
    moe_layer: LayerFacts = LayerFacts()
    kinds: list[KindFacts] = Field(default_factory=list)
    handed: HandedFacts | None = None
    tokens: bool = False  # whether layers get the token ids besides the states
    streams: int = 1  # of a token between layers, each of the hidden size
    dense_layer: DenseFacts | None = None
    mtp_layer: MtpFacts | None = None
    scale_dtype: Literal["F32", "BF16"] = "F32"
    expert_prefix: str
    expert_linears: dict[Matrix, LinearFacts]
    fused: dict[str, list[Matrix]] = Field(default_factory=dict)
    norm: NormFacts | None = None
    smoothing: dict[str, list[str]] = Field(default_factory=dict)
    router: RouterFacts
    modules: Modules
    targets: Targets | None = None
    kv_cache: KvCacheFacts | None = None
    tensor_parallel: TensorParallelFacts | None = None
    servers: dict[ServerName, ServerFacts] = Field(default_factory=dict)
    published: list[Published] = Field(default_factory=list)
    positions: int | None = None
    probes: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for problem in self._contradictions():
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        for word in NEEDED:
            if word not in self.sizes:
                yield f"sizes: {word} is missing"
        if ("groups" in self.sizes) != ("chosen_groups" in self.sizes):
            yield "sizes: groups and chosen_groups belong together; give both or neither"
        if self.rotary_dim_key and "head_dim" not in self.sizes:
            yield "sizes: head_dim is missing, of which rotary_dim_key names a part"
        for expression in self._expressions():
            if not EXPRESSION.fullmatch(expression):
                yield f"{expression!r} is no sum of products of sizes"
            for word in re.findall(r"\w+", expression):
                if not word.isdigit() and word not in self.sizes:
                    yield f"{expression!r}: there is no size {word!r}"
        moe_tensors = {name for kind in self.every_kind(with_dense=False) for name in kind.tensors}
        all_tensors = {name for kind in self.every_kind() for name in kind.tensors}
        for key, name, tensors in (
            *([("norm.tensor", self.norm.tensor, moe_tensors)] if self.norm else []),
            ("router.tensor", self.router.tensor, moe_tensors),
            ("embedding", self.embedding, self.outside),
            ("head", self.head, self.outside),
        ):
            if name not in tensors:
                yield f"{key}: {name} is not among the tensors"
        for reader in self._readers:
            linears = self.every_linear(with_dense=False)
            if reader not in (ROUTER, EXPERTS, "residual", *linears, *moe_tensors, *self.outside, *self._strangers()):
                yield f"norm.readers: {reader} is neither {ROUTER}, {EXPERTS} nor residual, nor any tensor"
        linear = self.every_linear()
        for before, readers in self.smoothing.items():
            if before not in all_tensors and before not in linear:
                yield f"smoothing: {before} is neither a tensor nor a linear module of a layer"
            for reader in readers:
                if reader not in linear:
                    yield f"smoothing.{before}: {reader} is no linear module of a layer"
        for name in self.modules.without:
            if name not in all_tensors and name not in linear:
                yield f"modules.without: {name} is neither a linear module nor a tensor of a layer"
        everywhere = {name for part in self._parts() for name in part.linears}
        for key, parts in self._divided():
            for name in parts:
                if name not in everywhere:
                    yield f"tensor_parallel.{key}: {name} is no linear module of a layer"
        for pattern in self.targets.patterns() if self.targets else ():
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as failure:
                yield f"targets: {pattern!r} is not a regular expression ({failure.msg})"
        for pattern in self.unread:
            try:
                taken = next((name for name in self._names() if re.fullmatch(pattern, name)), None)
            except re.error as failure:
                yield f"unread: {pattern!r} is not a regular expression ({failure.msg})"
            else:
                if taken is not None:
                    yield f"unread: {pattern!r} matches {taken}, which these facts name already; narrow it"

    def _strangers(self) -> Iterator[str]:
        """Unread readers of the norm, which a model's class has no place for."""
        numbers = [number for kind in self.kinds for number in kind.layers]
        for reader in self._readers:
            if any(self.is_unread(self.layer(number, reader)) for number in numbers):
                yield reader

    def _names(self) -> Iterator[str]:
        """The names of all tensors outside the layers, and of those of layer 0 with one expert."""
        yield from self.outside
        for part in self._parts():
            yield from (self.layer(0, name) for name in part.tensors)
            yield from (self.layer(0, f"{name}.weight") for name in part.linears)
        yield from (f"{self.expert(0, 0, matrix)}.weight" for matrix in self.expert_linears)

    def _expressions(self) -> Iterator[str]:
        yield from (size.otherwise for size in self.sizes.values() if size.otherwise is not None)
        if self.kv_cache:
            yield from (term for term in (self.kv_cache.numbers, self.kv_cache.split_by) if term is not None)
        yield from (term for _, parts in self._divided() for term in parts.values())
        layers = self._parts()
        tensors = [*self.outside.values(), *(tensor for part in layers for tensor in part.tensors.values())]
        shapes = [tensor.shape for tensor in tensors] + [shape for part in layers for shape in part.linears.values()]
        for shape in (*shapes, *(linear.shape for linear in self.expert_linears.values())):
            yield from shape

    def _parts(self) -> list[LayerFacts]:
        parts = (self.every_layer, self.moe_layer, *self.kinds, self.dense_layer, self.mtp_layer)
        return [part for part in parts if part]

    def _divided(self) -> Iterator[tuple[str, dict[str, str]]]:
        if self.tensor_parallel:
            yield from (("rows", self.tensor_parallel.rows), ("columns", self.tensor_parallel.columns))

    def of_model(self, config: Mapping[str, Any]) -> Architecture:
        """The facts of one model of the family: without the tensors that it lacks, as its config.json says."""

        def had(part: LayerFacts) -> LayerFacts:
            kept = {name: t for name, t in part.tensors.items() if t.when is None or config.get(t.when) is True}
            return part.model_copy(update={"tensors": kept})

        names = ("every_layer", "moe_layer", "dense_layer", "mtp_layer")
        changes = {name: had(part) for name in names if (part := getattr(self, name)) is not None}
        return self.model_copy(update=changes)

    @property
    def section_keys(self) -> list[str]:
        """Of the source's quantization_config, the keys that servers read whatever the method of quantization is."""
        return self.targets.keys if self.targets else SECTION_KEYS

    @property
    def _readers(self) -> list[str]:
        return self.norm.readers if self.norm else []

    @property
    def router_follows(self) -> bool:
        """Whether the router reads the norm, so that a scale which is folded into this must be multiplied into it."""
        return ROUTER in self._readers

    @property
    def also_reads_the_norm(self) -> list[str]:
        """What reads the norm besides the router and the experts: while there is any, no scale is folded into it.

        Only the router and the experts are compensated. Everything else keeps its bytes, and would read another input.
        """
        return [reader for reader in self._readers if reader not in (ROUTER, EXPERTS)]

    @property
    def against_a_fold(self) -> str | None:
        """Why no scale can be folded into the norm before the experts; None if one can."""
        if self.norm is None:
            return "the experts do not read the output of a norm with a vector of weights alone"
        if not self.also_reads_the_norm:
            return None
        others = ", ".join(self.also_reads_the_norm)
        return f"{self.norm.tensor} is also read by {others}, which would have to change with it and keeps its bytes"

    def found(self) -> dict[str, Any]:
        """What probing the model's own layers found, for report.json; empty for a family with a file of facts."""
        if not self.probes:
            return {}
        kinds = [kind.model_dump(exclude={"tensors", "linears"}) for kind in self.kinds]
        roles = {"norm": self.norm and self.norm.model_dump(), "router": self.router.model_dump()}
        experts = self.modules.experts
        return {"class": self.model_class, "experts": experts, **roles, "kinds": kinds, "probes": self.probes}

    def as_yaml(self) -> str:
        """A file of these facts, without what the probes found, from which they can be read again."""
        facts = self.model_dump(mode="json", exclude_defaults=True, exclude={"probes"})
        return dump(facts, width=120, short_in_one_line=True)

    def origin(self) -> str:
        """A sentence on where derived facts come from, and what the probes found; empty for a file of facts."""
        if not self.probes:
            return ""
        fold = f"no scale is folded, since {self.against_a_fold}" if self.against_a_fold else "scales can be folded"
        probes = ", ".join(f"{name} {number:.0e}" for name, number in self.probes.items())
        whole = sorted(number for kind in self.kinds if not kind.halves and not kind.dense for number in kind.layers)
        again = f"; layers {ranges(whole)} run whole each time" if whole else ""
        own = sorted(number for kind in self.kinds if kind.own_gate for number in kind.layers)
        gates = (
            f"; the experts of layers {ranges(own)} have a gate of their own, so no scale lies between w3 and w2"
            if own
            else ""
        )
        return (
            f"The architecture is derived from transformers' {self.model_class}, with which every layer is compared: "
            f"{fold}{again}{gates}. Probes on random weights, as a part of the largest value: {probes}"
        )

    def scaled_with(self, linear: str) -> str | None:
        """The norm, or the linear module, whose output a linear module reads, if a scale may lie between the two."""
        return next((before for before, readers in self.smoothing.items() if linear in readers), None)

    def of_layer(self, number: int, dense: Collection[int], mtp: Collection[int] = ()) -> LayerFacts:
        """What lies in a decoder layer besides its routed experts.

        Args:
            dense, mtp: the layers without experts, and those that predict further tokens, see `Sizes`.
        """
        by_number = next((kind for kind in self.kinds if number in kind.layers), None)
        if by_number:
            return by_number
        if number in mtp and self.mtp_layer:
            return _joined(self.every_layer, self.moe_layer, self.mtp_layer)
        return self._two_kinds(number in dense)

    def halves(self, number: int) -> bool:
        """Whether a decoder layer runs in two halves, see model/streamed_model.py."""
        return all(kind.halves for kind in self.kinds if number in kind.layers)

    def alone(self, number: int) -> bool:
        """Whether each sequence must go through a decoder layer alone."""
        return any(kind.alone for kind in self.kinds if number in kind.layers)

    def own_gate(self, number: int) -> bool:
        """Whether a decoder layer's experts have a gate of their own, through which no scale passes, see gates.py."""
        return any(kind.own_gate for kind in self.kinds if number in kind.layers)

    def every_kind(self, *, with_dense: bool = True) -> list[LayerFacts]:
        """What `of_layer` gives for any layer.

        Args:
            with_dense: False leaves out the layers without experts.
        """
        if self.kinds:
            return [kind for kind in self.kinds if with_dense or not kind.dense]
        return [self._two_kinds(dense) for dense in (False, True)[: 1 + with_dense]]

    def every_linear(self, *, with_dense: bool = True) -> dict[str, list[str]]:
        """The linear modules of all kinds of layers besides the routed experts, with their shapes."""
        return {name: shape for kind in self.every_kind(with_dense=with_dense) for name, shape in kind.linears.items()}

    def _two_kinds(self, dense: bool) -> LayerFacts:
        return _joined(self.every_layer, (self.dense_layer or LayerFacts()) if dense else self.moe_layer)

    def is_unread(self, name: str) -> bool:
        """Whether a tensor is one of those that are carried along without being opened."""
        return any(re.fullmatch(pattern, name) for pattern in self.unread)

    def layer(self, layer: int, name: str) -> str:
        """The full name of a tensor or module of a layer: `model.layers.3.` + name."""
        return self.layer_prefix.format(layer=layer) + name

    def expert(self, layer: int, expert: int, matrix: Matrix) -> str:
        """The full name of an expert's linear module, without the suffix `.weight`."""
        prefix = self.expert_prefix.format(expert=expert)
        return self.layer(layer, prefix + self.expert_linears[matrix].name)

    def in_transformers(self, name: str) -> str:
        """transformers' name for a published tensor name, both without the layer's prefix; a converted one's own."""
        if any(name in parts for parts in self.modules.converted.values()):
            return name
        if name in self.modules.rename:
            return self.modules.rename[name]
        for published, module in self.modules.rename.items():
            if name.startswith(published + "."):
                return module + name.removeprefix(published)
        return name


def _joined(*parts: LayerFacts) -> LayerFacts:
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    linears = {name: shape for part in parts for name, shape in part.linears.items()}
    return LayerFacts.model_construct(tensors=tensors, linears=linears)
