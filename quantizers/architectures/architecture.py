"""What is known about a model family: the schema of architectures/*.yaml.

The differences between families are data: names, shapes, which tensors read a norm's output, where the router is and
what its servers are told. families.py finds the file of a model, sizes.py checks a config.json against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from .matrices import Matrix

# A sum of products of sizes and numbers, worked out from left to right: "heads * head_dim", "hidden / heads".
EXPRESSION = re.compile(r"\s*\w+(\s*[*/+]\s*\w+)*\s*")
NEEDED = ("layers", "experts", "chosen", "hidden", "width", "vocabulary", "heads")
ROUTER, EXPERTS = "router", "experts"  # as readers of a norm
ServerName = Literal["vllm", "sglang"]


def _term(value: Any) -> Any:
    return str(value) if type(value) is int else value


# A size in a shape: an expression in sizes, or a number.
Term = Annotated[str, BeforeValidator(_term)]


class Facts(BaseModel):
    """Base of the classes below: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SizeFacts(Facts):
    """A size's key in config.json, and what a config.json without that key means: an expression in other sizes."""

    key: str
    otherwise: Term | None = None


class TensorFacts(Facts):
    """A tensor's shape in terms of `sizes`, and its published dtype. Any floating dtype is accepted in a checkpoint.

    Attributes:
        when: a key of config.json: a model has the tensor if this is true there. Every model has it without.
        optional: some models of the family lack it, and config.json does not say which.
    """

    shape: list[Term]
    dtype: Literal["BF16", "F16", "F32"]
    when: str | None = None
    optional: bool = False


class LayerFacts(Facts):
    """What lies in a decoder layer besides the routed experts, without the layer's prefix.

    Attributes:
        tensors: full names of those that are no linear module's.
        linears: linear modules with the shapes (rows, columns) of their weights; they keep their bytes.
    """

    tensors: dict[str, TensorFacts] = {}
    linears: dict[str, list[Term]] = {}


class DenseFacts(LayerFacts):
    """What only a layer without experts has.

    Attributes:
        layers: a key of config.json, see `sizes.dense_layers`.
        otherwise: how many there are at the start if config.json lacks it.
    """

    layers: str
    otherwise: int = 0


class MtpFacts(LayerFacts):
    """What a layer that predicts further tokens has besides all that a layer with experts has.

    Such layers follow the last one. Nothing here computes with them: they are kept whole, experts too.

    Attributes:
        layers: the key of config.json that says how many there are.
    """

    layers: str


class LinearFacts(Facts):
    """One matrix of an expert: its published name and its shape (rows, columns)."""

    name: str
    shape: list[Term]


class NormFacts(Facts):
    """The norm before the experts, into which AWQ may fold its scales, and everything that reads what comes out of it.

    Attributes:
        tensor: its weight, without the layer's prefix.
        readers: `router`, `experts` (their gate and up), `residual` (the residual stream continues from the norm's
            output), or the name of any other linear module, or of a tensor.
        offset: what the model adds to the stored weight w before it multiplies: 1 where it computes (1 + w) x.
    """

    tensor: str
    readers: list[str]
    offset: Literal[0, 1] = 0


class RouterFacts(Facts):
    """The router.

    Attributes:
        tensor: its weight, without the layer's prefix.
        served: the dtype in which servers hold it, and in which it is written when it is compensated.
        scoring: what it makes of its logits before it chooses.
    """

    tensor: str
    served: Literal["F32", "BF16"]
    scoring: Literal["sigmoid", "softmax"]


class Modules(Facts):
    """The decoder layer in transformers.

    Attributes:
        rename: from published names to transformers' names of modules.
        aliases: other programs' names of tensors, with the published ones.
        without: published names of tensors and linear modules of a layer that transformers' layer has no place for.
            They are kept, and the forward pass does without them.
        norm, router, experts: paths of submodules.
    """

    rename: dict[str, str] = {}
    aliases: dict[str, str] = {}
    without: list[str] = []
    norm: str
    router: str
    experts: str


class Targets(Facts):
    """Regular expressions for quantization_config, for the names under which any server looks its modules up.

    Attributes:
        fp8: of the kept linear modules, and of what servers fuse them to.
        experts: the end of the name of an expert's matrix.
        ignore: names and expressions (`re:`) of what is not quantized.
        unquantized: the same of the kept linear modules, for a model in which they are not FP8.
        keys: of the source's quantization_config, those that servers read whatever the method of quantization is.
    """

    fp8: list[str]
    experts: str
    ignore: list[str]
    unquantized: list[str]
    keys: list[str] = []


class KvCacheFacts(Facts):
    """What a server caches of one token in one layer.

    Attributes:
        numbers: how many numbers, over all heads.
        split_by: into how many parts tensor parallelism can divide them, and with them the rows of k and v; with more
            cards, parts are repeated. Without it every card holds all of them.
    """

    numbers: Term
    split_by: Term | None = None


class TensorParallelFacts(Facts):
    """How servers divide the kept linear modules of a layer among cards; those that are not named lie whole on each.

    Attributes:
        rows, columns: into how many parts the rows or columns of a module can be divided, by its name.
    """

    rows: dict[str, Term] = {}
    columns: dict[str, Term] = {}


# Of a server's command line: values by name, `true` for one that takes none.
Options = dict[str, str | Literal[True]]


class ServerFacts(Facts):
    """A server that knows the family.

    Attributes:
        experts: its name for the module of a layer's experts, without the layer's prefix.
        asks_for_router: whether it looks the router up in quantization_config, or else always builds it plain.
        fused: linear modules that it builds as one besides q, k and v, and gate and up: the parts by its name for it.
        mtp_prefix: its prefix for a layer that predicts further tokens, where that is not `layer_prefix`.
        options: to be given when it is started.
    """

    experts: str
    asks_for_router: bool = False
    fused: dict[str, list[str]] = {}
    mtp_prefix: str | None = None
    options: Options = {}


class Published(Facts):
    """Models of one size on the Hub.

    Attributes:
        license: the license fields of their cards.
        options: to be given when a server is started, besides those of the family.
        config: the parts of their config.json that decide what is planned.
    """

    models: list[str]
    license: dict[str, str]
    options: dict[ServerName, Options] = {}
    config: dict[str, Any]


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
    final_norm: str
    head: str
    unread: list[str] = []
    layer_prefix: str
    every_layer: LayerFacts
    moe_layer: LayerFacts
    dense_layer: DenseFacts | None = None
    mtp_layer: MtpFacts | None = None
    scale_dtype: Literal["F32", "BF16"] = "F32"
    expert_prefix: str
    expert_linears: dict[Matrix, LinearFacts]
    norm: NormFacts
    smoothing: dict[str, list[str]] = {}
    router: RouterFacts
    modules: Modules
    targets: Targets
    kv_cache: KvCacheFacts | None = None
    tensor_parallel: TensorParallelFacts | None = None
    servers: dict[ServerName, ServerFacts] = {}
    published: list[Published] = []

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
        for key, name, tensors in (
            ("norm.tensor", self.norm.tensor, self.tensors(dense=False)),
            ("router.tensor", self.router.tensor, self.tensors(dense=False)),
            ("embedding", self.embedding, self.outside),
            ("final_norm", self.final_norm, self.outside),
            ("head", self.head, self.outside),
        ):
            if name not in tensors:
                yield f"{key}: {name} is not among the tensors"
        for reader in self.norm.readers:
            tensors, linears = self.tensors(dense=False), self.linears(dense=False)
            if reader not in (ROUTER, EXPERTS, "residual", *linears, *tensors, *self.outside):
                yield f"norm.readers: {reader} is neither {ROUTER}, {EXPERTS} nor residual, nor any tensor"
        kinds = (False, True)
        linear = {name for dense in kinds for name in self.linears(dense)}
        for before, readers in self.smoothing.items():
            if not any(before in self.tensors(dense) for dense in kinds) and before not in linear:
                yield f"smoothing: {before} is neither a tensor nor a linear module of a layer"
            for reader in readers:
                if reader not in linear:
                    yield f"smoothing.{before}: {reader} is no linear module of a layer"
        for name in self.modules.without:
            if not any(name in (*self.tensors(dense), *self.linears(dense)) for dense in (False, True)):
                yield f"modules.without: {name} is neither a linear module nor a tensor of a layer"
        everywhere = {name for part in self._parts() for name in part.linears}
        for key, parts in self._divided():
            for name in parts:
                if name not in everywhere:
                    yield f"tensor_parallel.{key}: {name} is no linear module of a layer"
        for pattern in (*self.targets.fp8, self.targets.experts, *self.targets.ignore, *self.targets.unquantized):
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
        return [part for part in (self.every_layer, self.moe_layer, self.dense_layer, self.mtp_layer) if part]

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
    def also_reads_the_norm(self) -> list[str]:
        """What reads the norm besides the router and the experts: while there is any, no scale is folded into it.

        Only the router and the experts are compensated. Everything else keeps its bytes, and would read another input.
        """
        return [reader for reader in self.norm.readers if reader not in (ROUTER, EXPERTS)]

    def scaled_with(self, linear: str) -> str | None:
        """The norm, or the linear module, whose output a linear module reads, if a scale may lie between the two."""
        return next((before for before, readers in self.smoothing.items() if linear in readers), None)

    def tensors(self, dense: bool) -> dict[str, TensorFacts]:
        """The tensors of a layer, of one without experts if `dense`, that are no linear module's."""
        return self.every_layer.tensors | self._kind(dense).tensors

    def linears(self, dense: bool) -> dict[str, list[str]]:
        """The linear modules of a layer besides the routed experts, with their shapes."""
        return self.every_layer.linears | self._kind(dense).linears

    def mtp_tensors(self) -> dict[str, TensorFacts]:
        """The tensors of a layer that predicts further tokens, that are no linear module's."""
        assert self.mtp_layer is not None
        return self.tensors(dense=False) | self.mtp_layer.tensors

    def mtp_linears(self) -> dict[str, list[str]]:
        """The linear modules of such a layer besides its routed experts, with their shapes."""
        assert self.mtp_layer is not None
        return self.linears(dense=False) | self.mtp_layer.linears

    def is_unread(self, name: str) -> bool:
        """Whether a tensor is one of those that are carried along without being opened."""
        return any(re.fullmatch(pattern, name) for pattern in self.unread)

    def _kind(self, dense: bool) -> LayerFacts:
        return self.moe_layer if not dense else self.dense_layer or LayerFacts()

    def layer(self, layer: int, name: str) -> str:
        """The full name of a tensor or module of a layer: `model.layers.3.` + name."""
        return self.layer_prefix.format(layer=layer) + name

    def expert(self, layer: int, expert: int, matrix: Matrix) -> str:
        """The full name of an expert's linear module, without the suffix `.weight`."""
        prefix = self.expert_prefix.format(expert=expert)
        return self.layer(layer, prefix + self.expert_linears[matrix].name)

    def in_transformers(self, name: str) -> str:
        """transformers' name for a published tensor name, both without the layer's prefix."""
        for published, module in self.modules.rename.items():
            if name.startswith(published + "."):
                return module + name.removeprefix(published)
        return name
