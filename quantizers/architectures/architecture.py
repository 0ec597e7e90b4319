"""What is known about a model: names, shapes and roles of its tensors, and what its servers are told.

Names, shapes and places come from the model's class in transformers (derive.py), roles from probes or the family's
data, everything about servers from the family's data alone (families.py). facts.py has the parts.
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from quantizers.system.formatting import ranges
from quantizers.system.strict_yaml import dump

from .facts import (
    Facts,
    HandedFacts,
    KindFacts,
    KvCacheFacts,
    LinearFacts,
    Modules,
    MtpFacts,
    NormFacts,
    Options,
    Published,
    RoleFacts,
    RouterFacts,
    ServerFacts,
    ServerName,
    Shape,
    SizeFacts,
    Targets,
    TensorFacts,
    TensorParallelFacts,
)
from .matrices import Matrix

NEEDED = ("layers", "experts", "chosen", "hidden", "width", "vocabulary", "heads")  # of the sizes
ROUTER, EXPERTS = "router", "experts"  # as readers of a norm
SECTION_KEYS = ["scale_fmt"]  # for a family whose servers are not known: vLLM reads it of every model


class Known(Facts):
    """What no class says. See architectures/minimax_m2.yaml for the meaning of each key."""

    model_type: str
    model_class: str
    asserts: dict[str, Any] = Field(default_factory=dict)
    unread: list[str] = Field(default_factory=list)
    scale_dtype: Literal["F32", "BF16"] = "F32"
    smoothing: dict[str, list[str]] = Field(default_factory=dict)
    targets: Targets | None = None
    kv_cache: KvCacheFacts | None = None
    tensor_parallel: TensorParallelFacts | None = None
    servers: dict[ServerName, ServerFacts] = Field(default_factory=dict)
    published: list[Published] = Field(default_factory=list)

    @model_validator(mode="after")
    def _expressions(self) -> Self:
        own = self.targets
        targets = [*own.fp8, own.experts, *own.ignore, *own.unquantized] if own else []
        for key, pattern in (*(("targets", one) for one in targets), *(("unread", one) for one in self.unread)):
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error as failure:
                raise ValueError(f"{key}: {pattern!r} is not a regular expression ({failure.msg})") from None
        return self


class Family(Known):
    """The data about a family, architectures/*.yaml."""

    float32: list[str] = Field(default_factory=list)
    mtp_layer: MtpFacts | None = None
    roles: RoleFacts
    aliases: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)


class Architecture(Known):
    """The facts about one model."""

    sizes: dict[str, SizeFacts]
    outside: dict[str, TensorFacts]
    embedding: str
    head: str
    layer_prefix: str
    kinds: list[KindFacts]
    mtp: KindFacts | None = None
    handed: HandedFacts | None = None
    tokens: bool = False  # whether layers get the token ids besides the states
    streams: int = 1  # of a token between layers, each of the hidden size
    expert_prefix: str
    expert_linears: dict[Matrix, LinearFacts]
    fused: dict[str, list[Matrix]] = Field(default_factory=dict)  # tensors of all experts, and of which matrices
    norm: NormFacts | None = None
    router: RouterFacts
    modules: Modules
    positions: int | None = None
    probes: dict[str, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for word in (*NEEDED, *(("kv_heads",) if self.kv_cache and self.kv_cache.divided else ())):
            if word not in self.sizes:
                raise ValueError(f"sizes: {word} is missing")
        for name in self.kv_cache.rows_of if self.kv_cache else ():
            if name not in self.every_linear():
                raise ValueError(f"kv_cache.rows_of: {name} is no linear module of a layer")
        in_layers = {name for kind in self.kinds for name in kind.tensors}
        for key, name, tensors in (
            *([("norm.tensor", self.norm.tensor, in_layers)] if self.norm else []),
            ("router.tensor", self.router.tensor, in_layers),
            ("embedding", self.embedding, self.outside),
            ("head", self.head, self.outside),
        ):
            if name not in tensors:
                raise ValueError(f"{key}: {name} is not among the tensors")
        words = {ROUTER, EXPERTS, "residual", *self.every_linear(), *in_layers, *self.outside}
        numbers = [number for kind in self.kinds for number in kind.layers]
        for reader in self._readers:  # one that the class has no place for is unread
            if reader not in words and not any(self.is_unread(self.layer(number, reader)) for number in numbers):
                raise ValueError(f"norm.readers: {reader} is neither {ROUTER}, {EXPERTS} nor residual, nor any tensor")
        return self

    def server_options(self, server: ServerName, model: str) -> Options:
        """The options to start a server with that knows the family: the family's, and those of the model `model`."""
        published = (one.options.get(server, {}) for one in self.published if model in one.models)
        return self.servers[server].options | next(published, {})

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
        whole = [number for kind in self.kinds if not kind.halves and not kind.dense for number in kind.layers]
        again = f"; layers {ranges(whole)} run whole each time" if whole else ""
        own = [number for kind in self.kinds if kind.own_gate for number in kind.layers]
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

    def of_layer(self, number: int) -> KindFacts:
        """What lies in a decoder layer, or one that predicts further tokens, besides its routed experts."""
        kinds = [*self.kinds, self.mtp] if self.mtp else self.kinds
        return next(kind for kind in kinds if number in kind.layers)

    def every_linear(self) -> dict[str, Shape]:
        """The linear modules of all kinds of layers besides the routed experts, with their shapes."""
        return {name: shape for kind in self.kinds for name, shape in kind.linears.items()}

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
