"""Facts about a model: names, shapes and roles of its tensors, and settings for the servers that run it.

Names, shapes and places come from the model's class in transformers (derive.py), roles from probes or the family's
data, everything about servers from the family's data alone (families.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quantizers.system.formatting import ranges
from quantizers.system.strict_yaml import dump

from .matrices import FUSED, MATRICES, WITHOUT_GATE, Matrix

NEEDED = ("layers", "experts", "chosen", "hidden", "width", "vocabulary", "heads")  # of the sizes
ROUTER, EXPERTS = "router", "experts"  # as readers of a norm
SECTION_KEYS = ["scale_fmt"]  # for a family whose servers are not known: vLLM reads it of every model
ServerName = Literal["vllm", "sglang"]
Shape = tuple[int, ...]


class Stored(Protocol):
    """The header entry of a stored tensor: its dtype as safetensors calls it, and its shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SizeFacts(Facts):
    """A size, and its key in config.json for messages."""

    key: str
    value: int


class TensorFacts(Facts):
    """A tensor's shape, and its published dtype; for a floating one any other is accepted too."""

    shape: Shape
    dtype: Literal["BF16", "F16", "F32", "I32", "I64"]
    optional: bool = False  # some models of the family lack it, and config.json does not say which


class KindFacts(Facts):
    """All that lies in decoder layers of one kind besides the routed experts, without the layer's prefix."""

    tensors: dict[str, TensorFacts] = {}  # those that are no linear module's
    linears: dict[str, Shape] = {}  # linear modules with the shapes (rows, columns) of their weights
    layers: list[int]
    dense: bool  # whether they have no experts
    halves: bool  # whether they run in two halves, see model/streamed_model.py
    alone: bool  # whether each sequence must go through them alone, since others beside it would change its states
    own_gate: bool = False  # whether their experts have a gate of their own, see gates.py
    degree: int = 1  # of what down reads in up's rows, see gates.py; 0 where no scale of these passes through
    cached: str | None = None  # the attention module whose keys and values a server caches; not linear or latent ones

    @property
    def inner(self) -> int:
        """The degree of a scale between up and down; 0 where there can be none."""
        return 0 if self.own_gate else self.degree


class HandedFacts(Facts):
    """The tensor that a layer passes to the next besides its states, such as the tokens that an indexer has chosen."""

    argument: str  # the layer's parameter that gets it
    entry: int  # its place in the tuple that a layer returns; None there stands for nothing
    width: int  # of its last dimension, at most; those before are sequences and tokens
    dtype: Literal["float", "int32", "int64"]  # `float` for the model's own


class MtpFacts(Facts):
    """Tensors of a multi-token prediction (MTP) layer besides those of a layer with experts.

    Such layers follow the last one. Nothing here computes with them: they are kept whole, experts too.
    """

    layers: str  # the key of config.json that says how many there are
    tensors: dict[str, list[Literal["hidden", "vocabulary", "hidden + hidden"]]]  # their shapes
    optional: list[str] = []  # those that some models of the family lack


class LinearFacts(Facts):
    """One matrix of an expert: its published name and its shape (rows, columns)."""

    name: str
    shape: Shape


class RoleFacts(Facts):
    """The parts of a layer with experts, which probes find in a model of another family."""

    norm: str  # this and the next two: paths of submodules of transformers' layer
    router: str
    experts: str
    scoring: Literal["sigmoid", "softmax"]  # this and the next: as in `RouterFacts`
    served: Literal["F32", "BF16"]
    readers: tuple[str, ...] = ()  # the linear modules that read the norm besides router and experts


class NormFacts(Facts):
    """The norm before the experts, into which AWQ may fold its scales, and everything that reads what comes out of it.

    Attributes:
        tensor: its weight, without the layer's prefix.
        readers: `experts` (their gate and up), `router` if it reads the same, `residual` (the residual stream continues
            from the norm's output), or the name of any other linear module, or of a tensor.
        offset: what the model adds to the stored weight w before it multiplies: 1 where it computes (1 + w) x.
    """

    tensor: str
    readers: list[str]
    offset: Literal[0, 1] = 0


class RouterFacts(Facts):
    """The router: the matrix that makes its scores, without the prefix, and what these become before a choice."""

    tensor: str
    served: Literal["F32", "BF16"]  # how servers hold it, and how it is written when it is compensated
    scoring: Literal["sigmoid", "softmax"]


class TableFacts(Facts):
    """A table of which a layer looks rows up, such as one of n-grams: no device holds it, see model/table_rows.py.

    Attributes:
        tensors: the published names of the tensors whose rows follow each other in it, without the layer's prefix.
        scale: the name of the one number that all of an FP8 table is multiplied by.
    """

    tensors: list[str]
    scale: str | None = None


class Modules(Facts):
    """The decoder layer in transformers.

    Attributes:
        tables: by the paths of submodules that look up rows.
        converted: transformers' names of parameters that it makes of other tensors, joined, split or transposed, with
            the published names of these.
        idle: transformers' names of parameters of other experts, through which no text goes. They need no weights.
        transposed: whether the parameters of all experts are (E, H, 2I) and (E, I, H), not (E, 2I, H) and (E, H, I).
        interleaved: whether gate and up take turns in the first of them.
        weighs_inputs: whether the router weighs what experts read, see experts_call.py.
        norm, router, experts: paths of submodules. The experts read the norm's output; there may be no such module.
    """

    rename: dict[str, str] = {}  # from published names to transformers' names of modules
    aliases: dict[str, str] = {}  # other programs' names of tensors, with the published ones
    converted: dict[str, list[str]] = {}
    tables: dict[str, TableFacts] = {}
    idle: list[str] = []
    transposed: bool = False
    interleaved: bool = False
    weighs_inputs: bool = False
    norm: str | None = None
    router: str
    experts: str

    @property
    def layout(self) -> dict[str, bool]:
        """The way in which a module holds the matrices of all experts, for functions in matrices.py."""
        return {"transposed": self.transposed, "interleaved": self.interleaved}


class Targets(Facts):
    """Regular expressions for quantization_config, for the names under which any server looks its modules up."""

    fp8: list[str]  # of the kept linear modules, and of what servers fuse them to
    experts: str  # the end of the name of an expert's matrix
    ignore: list[str]  # names and expressions (`re:`) of what is not quantized
    unquantized: list[str]  # the same of the kept linear modules, for a model in which they are not FP8
    keys: list[str] = []  # of the source's quantization_config, those that servers read whatever the method is


class KvCacheFacts(Facts):
    """Numbers that a server caches per token and layer: one for each row of the linear modules `rows_of`.

    Attributes:
        divided: whether tensor parallelism divides them by heads of keys and values; with more cards than heads, heads
            are repeated. Otherwise every card holds all of them.
    """

    rows_of: list[str]
    divided: bool = False


Parts = Literal["heads", "kv_heads", "own"]


class TensorParallelFacts(Facts):
    """Tensor parallelism of a layer's kept linear modules; modules that are not named are whole on every card.

    Attributes:
        rows, columns: into how many parts the rows or columns of a module can be divided, by its name: as many as there
            are heads, heads of keys and values, or rows or columns.
    """

    rows: dict[str, Parts] = {}
    columns: dict[str, Parts] = {}


# Of a server's command line: values by name, `true` for one that takes none.
Options = dict[str, str | Literal[True]]


class ServerFacts(Facts):
    """A server that knows the family."""

    experts: str  # its name for the module of a layer's experts, without the layer's prefix
    asks_for_router: bool = False  # whether it looks the router up in quantization_config, or else builds it plain
    fused: dict[str, list[str]] = {}  # what it builds as one besides q, k and v, gate and up: the parts by its name
    ties_head: bool = False  # whether it takes the embeddings where `tie_word_embeddings` is true and no head is stored
    mtp_prefix: str | None = None  # of a layer that predicts further tokens, where that is not `layer_prefix`
    options: Options = {}  # to be given when it is started


class Published(Facts):
    """Models of one size on the Hub, with the license fields of their cards."""

    models: list[str]
    license: dict[str, str]
    options: dict[ServerName, Options] = {}  # to be given when a server is started, besides those of the family
    config: dict[str, Any] = {}  # the parts of their config.json that decide what is planned, where they differ


class Known(Facts):
    """Facts that the model's class does not give. See architectures/minimax_m2.yaml for the meaning of each key."""

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
        for key, pattern in (*(("targets", regex) for regex in targets), *(("unread", regex) for regex in self.unread)):
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

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, without those that predict further tokens."""
        return self.sizes["layers"].value

    @property
    def num_experts(self) -> int:
        """Number of routed experts of a layer."""
        return self.sizes["experts"].value

    @property
    def top_k(self) -> int:
        """Number of experts that the router chooses for a token."""
        return self.sizes["chosen"].value

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states, H."""
        return self.sizes["hidden"].value

    @property
    def expert_width(self) -> int:
        """Width of a routed expert, I."""
        return self.sizes["width"].value

    @property
    def expert_inputs(self) -> int:
        """Width of what a routed expert reads and returns: H, but where its input is projected to fewer numbers."""
        return self.sizes["latent"].value if "latent" in self.sizes else self.hidden_size

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices of a routed expert, in their order."""
        return tuple(matrix for matrix in MATRICES if matrix in self.expert_linears)

    @property
    def identities(self) -> int:
        """Number of further experts of a layer without matrices: they return what they read. They come last."""
        return self.sizes["identities"].value if "identities" in self.sizes else 0

    @property
    def expert_numbers(self) -> int:
        """Numbers in all matrices of a routed expert."""
        return len(self.matrices) * self.expert_inputs * self.expert_width

    @property
    def expert_parameters(self) -> dict[str, tuple[Matrix, ...]]:
        """transformers' parameters of all experts of a layer, and which matrices they hold."""
        return FUSED if "gate" in self.expert_linears else WITHOUT_GATE

    @property
    def fused_ends(self) -> dict[str, Sequence[Matrix]]:
        """The ends of the names of tensors of all experts of a layer, and which matrices they hold."""
        ends: dict[str, Sequence[Matrix]] = {f".experts.{last}": held for last, held in self.expert_parameters.items()}
        return ends | {f".{end}": held for end, held in self.fused.items()}

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table."""
        return self.sizes["vocabulary"].value

    @property
    def num_heads(self) -> int:
        """Number of attention heads."""
        return self.sizes["heads"].value

    @property
    def num_kv_heads(self) -> int:
        """Number of heads of keys and values; a KeyError for a family whose facts have none."""
        return self.sizes["kv_heads"].value

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json has the sizes of this model, as far as it gives them by their keys."""
        given = config.get("text_config", config)
        return all(given.get(size.key, size.value) == size.value for size in self.sizes.values())

    @property
    def dense(self) -> frozenset[int]:
        """The numbers of the layers that have no experts."""
        return frozenset(number for kind in self.kinds if kind.dense for number in kind.layers)

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of the layers that have experts."""
        return sorted(number for kind in self.kinds if not kind.dense for number in kind.layers)

    @property
    def mtp_layers(self) -> list[int]:
        """The numbers of the layers that predict further tokens, which follow the others and are not among `layers`."""
        return self.mtp.layers if self.mtp else []

    @property
    def groups(self) -> tuple[int, int]:
        """Into how many groups the router divides the experts, and from how many of them it chooses."""
        if "groups" not in self.sizes:
            return 1, 1
        return self.sizes["groups"].value, self.sizes["chosen_groups"].value

    @property
    def extra_columns(self) -> int:
        """32-bit numbers that are kept of a token besides its state: what a layer hands on, and the token's id."""
        return (1 + self.handed.width if self.handed else 0) + self.tokens

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of what is kept of a token between two layers: its state in `itemsize` each, and what is beside it."""
        return self.hidden_size * self.streams * itemsize + self.extra_columns * 4

    def server_options(self, server: ServerName, model: str) -> Options:
        """The options to start a server with that knows the family: the family's, and those of the model `model`."""
        published = (size.options.get(server, {}) for size in self.published if model in size.models)
        return self.servers[server].options | next(published, {})

    @property
    def section_keys(self) -> list[str]:
        """Keys of the source's quantization_config that servers read whatever the quantization method is."""
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
        """Readers of the norm besides the router and the experts: if there are any, no scale is folded into it.

        Only the router and the experts are compensated. Everything else keeps its bytes, and would read another input.
        """
        return [reader for reader in self._readers if reader not in (ROUTER, EXPERTS)]

    @property
    def against_a_fold(self) -> str | None:
        """Reason why no scale can be folded into the norm before the experts; None if one can."""
        if self.norm is None:
            return "the experts do not read the output of a norm with a vector of weights alone"
        if not self.also_reads_the_norm:
            return None
        others = ", ".join(self.also_reads_the_norm)
        return f"{self.norm.tensor} is also read by {others}, which would have to change with it and keeps its bytes"

    def found(self) -> dict[str, Any]:
        """Results of probing the model's own layers, for report.json; empty for a family with a file of facts."""
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
        if self.identities:
            gates += f"; {self.identities} experts of a layer have no matrices and return what they read"
        if "gate" not in self.expert_linears:
            scale = {
                0: ", through which no scale passes",
                1: ": a scale between w3 and w2 is exact",
                2: ": a scale between w3 and w2 is exact, as its root in w3",
            }
            gates += f"; the experts have no gate{scale[max(kind.inner for kind in self.kinds if not kind.dense)]}"
        return (
            f"The architecture is derived from transformers' {self.model_class}, with which every layer is compared: "
            f"{fold}{again}{gates}. Probes on random weights, as a part of the largest value: {probes}"
        )

    def scaled_with(self, linear: str) -> str | None:
        """The norm, or the linear module, whose output a linear module reads, if a scale may lie between the two."""
        return next((before for before, readers in self.smoothing.items() if linear in readers), None)

    def of_layer(self, number: int) -> KindFacts:
        """Return the facts about a decoder or MTP layer, except for its routed experts."""
        kinds = [*self.kinds, self.mtp] if self.mtp else self.kinds
        return next(kind for kind in kinds if number in kind.layers)

    def tables(self, number: int) -> dict[str, TableFacts]:
        """The tables of a layer, by the paths of the submodules that look up their rows."""
        here = self.of_layer(number).tensors
        return {path: table for path, table in self.modules.tables.items() if table.tensors[0] in here}

    def in_tables(self, number: int) -> list[str]:
        """The full names of the tensors of a layer's tables, with their scales."""
        tables = self.tables(number).values()
        names = (name for table in tables for name in (*table.tensors, table.scale) if name is not None)
        return [self.layer(number, name) for name in names]

    @cached_property
    def table_parts(self) -> dict[str, int]:
        """The number of the part of a checkpoint that each tensor of a table is in: behind those of all layers."""
        named = {number: self.in_tables(number) for kind in self.kinds for number in kind.layers}
        first, layers = self.num_layers + len(self.mtp_layers), sorted(number for number in named if named[number])
        return {name: first + index for index, number in enumerate(layers) for name in named[number]}

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
