"""The schema of a recipe. A recipe decides every output byte; flags decide only paths and the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from quantizers.formats.format import INTEGERS, ExpertFormat, expert_formats, format_of, names_with
from quantizers.hooks import hook
from quantizers.system.errors import InputError, RecipeError
from quantizers.system.formatting import parse_bytes
from quantizers.system.schema import Strict, Wrong

from .cards import CARDS, Card, card_of

Format = Literal["int", "nvfp4"]  # the names of formats that experts can be quantized to, see formats/format.py


def counted(schemes: Iterable[ExpertFormat]) -> str:
    """`INT4 group 64` if all layers have the same scheme, else `INT4 group 32 (3 layers), INT4 group 64 (1 layer)`."""
    counts = Counter(schemes)
    if len(counts) == 1:
        return str(next(iter(counts)))
    return ", ".join(f"{s} ({n} layer{'s' if n > 1 else ''})" for s, n in sorted(counts.items()))


# What becomes of the linear modules that are not routed experts: they keep their bytes, or are converted, see
# formats/conversion.py.
Attention = Literal["keep", "bf16", "fp8", "fp8-block"]

# What experts can be converted to without changing a value, see formats/lossless.py.
Convert = Literal["bf16", "fp8-block", "mxfp4", "nvfp4"]

# An optional key that is part of the settings, and of their hash, only if a recipe gives it.
ONLY_IF_GIVEN = Field(exclude_if=lambda value: value is None)


class Source(Strict):
    """The checkpoint to read."""

    model: Annotated[str, Field(min_length=1)]
    """A Hub id, or a folder relative to the recipe."""
    revision: str = "main"
    """Of a Hub id: a branch, tag or commit."""
    trust_remote_code: Literal[False, "tokenizer", True] = False
    """`tokenizer` lets the tokenizer run its own code. No other code of a source ever runs: `true` means the same."""
    facts: Annotated[Annotated[str, Field(min_length=1)] | None, ONLY_IF_GIVEN] = None
    """A file with your own architecture spec for the model's family, relative to the recipe. Default: the built-in
    spec."""
    accept_quantized: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether experts that have 4 bits or fewer in the source may be quantized once more. What is measured is then the
    distance from these, not from what they were made of."""

    @property
    def trusts_tokenizer(self) -> bool:
        """Whether the tokenizer may run code of its own."""
        return self.trust_remote_code is not False


class Calibration(Strict):
    """A calibration set, or a part of it.

    With `set` alone it means the same as the set's name, and that is how the settings have it.
    """

    set: Annotated[str, Field(min_length=1)]
    """The name of a shipped set, or a path relative to the recipe."""
    tokens: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Number of tokens to draw: the same from each category where it has enough, in an order that the set's seed
    decides. Default: the whole set."""
    without: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Sources of the set to leave out, by their `dataset`. Samples of the same category take their place, or else
    texts of the set `embedded`."""

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any] | str:
        settings = {key: value for key, value in handler(self).items() if value}
        return settings if len(settings) > 1 else self.set


class Awq(Strict):
    """AWQ's scale search: one scale for each expert, between w3 and w2.

    With `fold` there is another one, shared by all experts of a layer and folded into the norm before them. That is
    exact where the router and the experts are the norm's only readers, as the architecture spec says.
    """

    grid: Annotated[int, Field(ge=3, le=200)] = 20
    """Number of candidates in the search: the identity, and `grid - 1` ratios from 0 to 1."""
    duo_scaling: bool = True
    """Whether candidates use activations and weights, or activations alone."""
    fold: Annotated[bool | None, ONLY_IF_GIVEN] = None
    """Whether a scale is folded into the norm before the experts, and the router compensated for it. Default: where
    that is exact. `true` refuses any other family, `false` leaves norms and routers unchanged."""


class Experts(Strict):
    """Quantization of the routed experts' matrices. Everything else keeps its bytes."""

    # These six come first, so that the validators of the keys that they exclude can see them.
    convert: Annotated[Convert | None, ONLY_IF_GIVEN] = None
    """Instead of all other keys: the same numbers in another format, for other kernels. Nothing is rounded: a value
    that the format does not hold ends the run, and a proof that all values are equal is in the report. Without
    `calibration`, `kv_cache` and `verify`. See [convert](../how-to/convert.md)."""
    budget: Annotated[str | None, ONLY_IF_GIVEN] = None
    """Size of all shards, such as `125GiB` or `120GB`, instead of `bits` and `group_size`: both are then chosen for
    each layer from measurements. 2 and 3 bits only where 4 in every layer do not fit. See
    [budget](../how-to/budget.md)."""
    bits_per_weight: Annotated[Annotated[float, Field(gt=0.0)] | None, ONLY_IF_GIVEN] = None
    """The same with a mean over the experts, scales included: INT4 in groups of 32 has 4.5."""
    tensor_parallel: Annotated[Annotated[int, Field(ge=1, le=64)] | None, ONLY_IF_GIVEN] = None
    """With a budget: the number of GPUs over which an expert is split when served; a group must fit each part."""
    format: Annotated[Format, Field(exclude_if=lambda value: value == INTEGERS)] = "int"
    """Integers, or `nvfp4` for Blackwell GPUs: FP4 (E2M1), an FP8 scale for every 16 weights, and a scale of the whole
    matrix; 4.5 bits per weight, without `bits`, `group_size` and `scales_sign`. See
    [variants](../explanation/variants.md)."""
    activations: Annotated[Literal[16, 4], Field(exclude_if=lambda value: value == 16)] = 16
    """With `nvfp4`: the bits of the activations that experts multiply. 4: servers on Blackwell round them to NVFP4 too,
    with a scale for each matrix from the calibration set."""
    bits: Literal[2, 3, 4, 5, 6, 8] = 4
    """Bits of a weight. Most servers take 4 and 8 only:
    see [serve](../how-to/serve-with-vllm.md#which-engine-takes-which-bits)."""
    group_size: Literal[32, 64, 128] = 32
    """Weights under one scale: smaller is better, and larger on disk."""
    symmetric: Literal[True] = True
    """There are no zero points: vLLM's Marlin MoE kernels take none."""
    engine: Literal["gram", "llmcompressor"] = "gram"
    """The solver of a layer: the native one, or llm-compressor's AWQ as a reference."""
    awq: Awq | Literal[False] = Awq()
    """AWQ's scale search; `false` leaves it out."""
    routed_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    """Extra weight of the tokens that the router sends to an expert. 0: all tokens count alike; 1: only those count."""
    scales: Literal["mse", "minmax"] = "mse"
    """A group's scale: by least squares, or from its largest weight."""
    scales_sign: Literal["both", "positive"] = "both"
    """Whether a group's scale may be negative. Codes reach one further down than up, and a negative scale turns that
    side to where the group needs it, at no cost in size. `positive` is for servers that take no other:
    see [serve](../how-to/serve-with-vllm.md#group-scales-of-both-signs)."""
    rounding: Literal["gptq", "nearest"] = "gptq"
    """GPTQ with two sweeps of coordinate descent, or round to nearest."""

    @field_validator("*")
    @classmethod
    def _alone(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name != "convert" and info.data.get("convert") is not None:
            raise Wrong("has no effect beside experts.convert, which rounds nothing", "remove one of the two keys")
        return value

    @property
    def by_budget(self) -> bool:
        """Whether each layer's scheme is chosen within a budget; `bits` and `group_size` are then unused."""
        return self.budget is not None or self.bits_per_weight is not None

    @property
    def scheme(self) -> ExpertFormat:
        """The format of all layers, for a recipe without a budget."""
        return format_of(vars(self))

    @property
    def signed(self) -> bool:
        """Whether a group's scale may be negative."""
        return self.scales_sign == "both" and "scales_sign" in self.scheme.keys

    @field_validator("budget", mode="before")
    @classmethod
    def _a_size(cls, budget: Any) -> Any:
        try:
            parse_bytes(str(budget), "")
        except InputError:
            raise Wrong("is not a size", "write it as 120GiB or 120GB") from None
        return budget

    @field_validator(
        "bits_per_weight", "tensor_parallel", "format", "activations", "bits", "group_size", "engine", "scales_sign"
    )
    @classmethod
    def _agree(cls, value: Any, info: ValidationInfo) -> Any:
        """Check a key against the keys before it. pydantic calls this only for keys in the file, in field order."""
        budget = next((f"experts.{key}" for key in ("budget", "bits_per_weight") if info.data.get(key) is not None), "")
        form, given = expert_formats()[info.data.get("format", INTEGERS)], value is not None
        decides = budget if "bits" in form.keys else f"experts.format: {form.name}"
        chooses = value if info.field_name == "format" else form.name
        one_of = "remove one of the two keys"
        of_decided = bool(decides) and given, f"{decides} decides this", one_of
        wrong, problem, remedy = {
            "bits_per_weight": of_decided,
            "tensor_parallel": (
                given and not budget,
                "bounds what a budget chooses",
                "give experts.budget instead of bits and group_size, or remove it",
            ),
            "format": (
                budget and "budget" not in expert_formats()[chooses].keys,
                f"{budget} chooses among integers",
                one_of,
            ),
            "activations": (
                "activations" not in form.keys,
                f"belongs to experts.format: {names_with('activations')}",
                "give that instead of bits and group_size, or remove this key",
            ),
            "bits": of_decided,
            "group_size": of_decided,
            "engine": (decides and value != "gram", f"{decides} needs the gram engine", one_of),
            "scales_sign": (
                "scales_sign" not in form.keys,
                f"experts.format: {form.name} has no negative scales",
                "remove this key",
            ),
        }[str(info.field_name)]
        if wrong:
            raise Wrong(problem, remedy)
        return value

    @model_serializer(mode="wrap")
    def _as_given(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        if self.convert is not None:
            return {"convert": self.convert}
        unused = {"bits", "group_size"} if self.by_budget else set()
        unused |= {"bits", "group_size", "scales_sign"} - expert_formats()[self.format].keys
        settings: dict[str, Any] = handler(self)
        return {key: value for key, value in settings.items() if key not in unused}


class CoverageGate(Strict):
    """Requirements on how many calibration tokens the router sends to the experts: to (layer, expert) pairs."""

    min_routed_tokens: Annotated[int, Field(ge=0)] = 1
    """An expert that gets fewer tokens of the calibration set is uncovered."""
    max_uncovered: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """The share of experts, over all layers, that may be uncovered."""
    categories: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """The same with a minimum for each category: `{code: 10, spoken/hindi: 1}`; `code` holds `code/rust` too."""
    min_entropy: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Least entropy of every layer's load, relative to an even one: 1 if all experts get the same."""


class PerplexityGate(Strict):
    """Limits on the held-out set. A figure without a limit is only reported."""

    data: str
    """The held-out set: the name of a shipped one, or a path relative to the recipe."""
    max_increase: Annotated[float, Field(ge=0.0)] | None = None
    """How much perplexity may rise, relative to the source: 0.02 is 2 %."""
    max_kl: Annotated[float, Field(ge=0.0)] | None = None
    """The largest mean KL(source || output), in nats."""
    max_p99: Annotated[Annotated[float, Field(ge=0.0)] | None, ONLY_IF_GIVEN] = None
    """The largest 99th percentile of KL(source || output) over the scored tokens, in nats."""
    max_source: Annotated[float, Field(gt=1.0)] | Literal["any"] = 100.0
    """The largest perplexity of the source itself, on the beginnings of a few texts, before anything is quantized: a
    checkpoint that is mixed up, or computed wrongly, makes no sense of text. `any`: it is not checked."""


class Stop(Strict):
    """Limits that each layer must keep on the held-out set, or the run stops after it with exit code 3."""

    max_hidden_error: Annotated[float, Field(gt=0.0)] | None = None
    """The largest ‖output − source‖ / ‖source‖ of the hidden states that leave a layer."""
    min_router_agreement: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """The smallest share of the source's expert choices that the output makes too."""


class Verify(Strict):
    """Measurements and gates: if a gate fails, the exit code is 3 instead of 0."""

    coverage: CoverageGate | None = None
    """How many tokens of the calibration set the router must send to each expert."""
    perplexity: PerplexityGate | None = None
    """How close the output must be to the source on a held-out set."""
    as_served: Annotated[tuple[Card, ...] | None, Field(strict=False), ONLY_IF_GIVEN] = None
    """Cards on which source and output are measured as well, as vLLM's kernels there would compute them, or GPUs by
    name, such as `NVIDIA L40S`; needs `perplexity`. Each takes two more passes of the held-out texts. Default: none;
    `[blackwell]` with `experts.activations: 4`."""
    stop: Annotated[Stop | None, ONLY_IF_GIVEN] = None
    """When to stop after a layer instead of finishing the output; needs `perplexity`."""

    @field_validator("as_served", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """GPUs by their names are cards too."""
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            return value
        try:
            cards = [card_of(name, "as_served") for name in value]
        except InputError:
            return value  # what pydantic says of it lists the cards
        return list(dict.fromkeys(cards))

    @field_validator("stop", "as_served")
    @classmethod
    def _measured(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and info.data.get("perplexity") is None:
            raise Wrong("is measured on a held-out set", "give verify.perplexity.data, or remove it")
        return value


class Recipe(Strict):
    """One recipe file."""

    source: Source
    """The checkpoint to read."""
    experts: Experts = Experts()
    """How the routed experts are quantized."""
    calibration: Annotated[str | Calibration | None, Field(validate_default=True), ONLY_IF_GIVEN] = None
    """The calibration set: the name of a shipped one, or a path relative to the recipe, see
    [calibration](calibration.md). Or `{set: NAME, tokens: 131072}` for a part of it. Needed, but with
    `experts.convert`."""
    attention: Annotated[Attention, Field(exclude_if=lambda value: value == "keep")] = "keep"
    """What becomes of attention, shared experts and dense layers. `keep`: the source's bytes. `bf16`: FP8 is
    dequantized, for servers and cards that cannot mix it with integers. `fp8`: a source in 16 bits becomes FP8 with a
    scale per row, `fp8-block` with one per block of 128 x 128. See [variants](../explanation/variants.md)."""
    kv_cache: Annotated[Literal["none", "fp8"], Field(exclude_if=lambda value: value == "none")] = "none"
    """`fp8`: scales for an FP8 cache of keys and values, from their largest magnitudes on the calibration set. Servers
    then cache in FP8 by themselves. See [variants](../explanation/variants.md)."""
    keep: Literal["everything-else"] = "everything-else"
    """What keeps its original bytes: everything but the routed experts, and what `attention` converts."""
    verify: Verify | None = None
    """What is measured, and the gates: exit code 3 when one fails; the output is completed nevertheless."""

    @field_validator("experts")
    @classmethod
    def _accepted(cls, value: Any, info: ValidationInfo) -> Any:
        source = info.data.get("source")
        if source is not None and value.convert is not None and getattr(source, "accept_quantized", False):
            raise Wrong("a conversion takes any source, so source.accept_quantized has no effect", "remove that key")
        return value

    @field_validator("calibration")
    @classmethod
    def _given(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and "experts" in info.data and info.data["experts"].convert is None:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("calibration", "kv_cache", "verify")
    @classmethod
    def _computed(cls, value: Any, info: ValidationInfo) -> Any:
        experts = info.data.get("experts")
        if experts is not None and experts.convert is not None and value not in (None, "none"):
            why = "all values are equal, so there is nothing to measure"
            if info.field_name != "verify":
                why = "nothing is computed on texts"
            raise Wrong(f"has no effect beside experts.convert: {why}", "remove this key")
        return value

    @field_validator("verify")
    @classmethod
    def _known_cards(cls, value: Any, info: ValidationInfo) -> Any:
        experts = info.data.get("experts")
        for card in (value and value.as_served) or ():
            if experts is not None and card in experts.scheme.unknown_on:
                name = experts.scheme.short
                raise Wrong(f"as_served: {card}: nothing is known of experts in {name} there", "remove this card")
        return value

    @property
    def calibration_set(self) -> str:
        """The calibration set as the recipe names it; a RecipeError for a recipe that converts, and names none."""
        if self.calibration is None:
            raise RecipeError(
                "experts.convert", "this recipe converts, and names no calibration set", "give one that quantizes"
            )
        return self.calibration if isinstance(self.calibration, str) else self.calibration.set

    @property
    def calibration_tokens(self) -> int | None:
        """Number of tokens drawn from the set; None if it is taken whole."""
        return self.calibration.tokens if isinstance(self.calibration, Calibration) else None

    @property
    def calibration_without(self) -> tuple[str, ...]:
        """The sources of the set that are left out."""
        return self.calibration.without if isinstance(self.calibration, Calibration) else ()

    @property
    def as_served(self) -> tuple[Card, ...]:
        """The cards on which source and output are measured; those that the experts' format asks for by itself.

        Of the latter there are none in an installation that cannot compute them.
        """
        verify = self.verify
        if verify is not None and verify.perplexity and verify.as_served is None:
            if hook("served_model") is None:  # nobody asked for them, so nothing is refused
                return ()
            return tuple(card for card in CARDS if card in self.experts.scheme.measured_on)
        return (verify and verify.as_served) or ()

    def settings(self) -> dict[str, Any]:
        """Every key with its value, including defaults, as stored in recipe.yaml and report.json."""
        return self.model_dump(mode="json")
