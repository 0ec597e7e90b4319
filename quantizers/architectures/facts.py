"""The parts of a family's facts, each a mapping in architectures/*.yaml; architecture.py has the whole.

What one part has to do with another is checked there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict

ServerName = Literal["vllm", "sglang"]


def _term(value: Any) -> Any:
    return str(value) if type(value) is int else value


# A size in a shape: an expression in sizes, or a number.
Term = Annotated[str, BeforeValidator(_term)]


class Facts(BaseModel):
    """Base of the classes below: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SizeFacts(Facts):
    """A size's key in config.json, and what a config.json without that key means: an expression in other sizes.

    Attributes:
        value: the size itself, of facts about one model; `key` then only names it in messages.
    """

    key: str
    otherwise: Term | None = None
    value: int | None = None


class TensorFacts(Facts):
    """A tensor's shape in terms of `sizes`, and its published dtype; for a floating one any other is accepted too.

    Attributes:
        when: a key of config.json: a model has the tensor if this is true there. Every model has it without.
        optional: some models of the family lack it, and config.json does not say which.
    """

    shape: list[Term]
    dtype: Literal["BF16", "F16", "F32", "I32", "I64"]
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


class KindFacts(LayerFacts):
    """All that lies in some decoder layers besides the routed experts: those of one kind.

    Attributes:
        layers: their numbers.
        dense: whether they have no experts.
        halves: whether they run in two halves, see model/streamed_model.py.
        alone: whether each sequence must go through them alone, since others beside it would change its states.
        own_gate: whether their experts have a gate of their own, see gates.py.
    """

    layers: list[int]
    dense: bool
    halves: bool
    alone: bool
    own_gate: bool = False


class HandedFacts(Facts):
    """What each layer hands on to the next besides its states, such as the tokens that an indexer has chosen.

    Attributes:
        argument: the layer's parameter that gets it.
        entry: its place in the tuple that a layer returns; None there stands for nothing.
        width: of its last dimension, at most; those before are sequences and tokens.
        dtype: of the model's own for `float`.
    """

    argument: str
    entry: int
    width: int
    dtype: Literal["float", "int32", "int64"]


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
        readers: `experts` (their gate and up), `router` if it reads the same, `residual` (the residual stream continues
            from the norm's output), or the name of any other linear module, or of a tensor.
        offset: what the model adds to the stored weight w before it multiplies: 1 where it computes (1 + w) x.
    """

    tensor: str
    readers: list[str]
    offset: Literal[0, 1] = 0


class RouterFacts(Facts):
    """The router.

    Attributes:
        tensor: the matrix that makes its scores, without the layer's prefix.
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
        converted: transformers' names of parameters that it makes of other tensors, joined, split or transposed, with
            the published names of these.
        idle: transformers' names of parameters of other experts, through which no text goes. They need no weights.
        norm, router, experts: paths of submodules. The experts read the norm's output; there may be no such module.
    """

    rename: dict[str, str] = {}
    aliases: dict[str, str] = {}
    without: list[str] = []
    converted: dict[str, list[str]] = {}
    idle: list[str] = []
    norm: str | None = None
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

    def patterns(self) -> list[str]:
        """All of the expressions."""
        return [*self.fp8, self.experts, *self.ignore, *self.unquantized]


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


class Stored(Protocol):
    """The header entry of a stored tensor."""

    @property
    def dtype(self) -> str:
        """As safetensors calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
