"""The schema of report.json, of whose parts `quantizers/pipeline/report.py` makes it.

docs/reference/report.md and its schema are made from it. Unless a description says otherwise, None stands
for a number that is not finite, and a key that may be absent has the default None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, SerializerFunctionWrapHandler, model_serializer

from quantizers.architectures.architecture import Options
from quantizers.eval.coverage.figures import Coverage, Drawn, Gate
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.output.journal import ShardDigest
from quantizers.system.keys import Number, Part, key, maybe


class SourceCard(Part):
    """Metadata from the checkpoint's own model card."""

    license: dict[str, str | list[str]] = key(
        "license (several in a list), license_name and license_link of the source's own model card, where known"
    )
    language: list[str] | None = maybe("Languages that the source's own model card names; absent without any")
    made_from: list[str] | None = maybe("Base models that a folder's own model card names; absent for a Hub id")


class Source(SourceCard):
    """The checkpoint that was quantized."""

    model: str = key("Hub id of the source, or the name of its folder")
    revision: str | None = key("Revision on the Hub; None for a folder without one")
    digest: str = key("SHA-256 over the headers and sizes of the source's files, hexadecimal")
    experts: str | None = maybe("How the source stores the routed experts that were quantized; absent for a stitch")


class PackedExperts(Part):
    """The checkpoint from which `stitch` took the experts, and what it says of itself."""

    model: str = key("Hub id, or the name of its folder")
    revision: str | None = key("Revision on the Hub; None for a folder without one")
    digest: str = key("SHA-256 over the headers and sizes of its files, hexadecimal")
    schemes: list[dict[str, int | str]] = key("bits and group_size of each scheme in it; of NVFP4 more")
    format: dict[str, str] | None = maybe("Quantization method and version in its config.json; absent where unknown")
    modifiers: list[str] | None = maybe("llm-compressor's modifiers in its recipe.yaml, in order; absent without any")
    card: dict[str, list[str]] | None = maybe("Base model, licence, data sets on its model card; absent without any")


class Stitched(Part):
    """The settings of `stitch`, by which the same command recognizes its output."""

    model_config = ConfigDict(extra="allow")  # with facts.yaml: the SHA-256 of the user's own facts
    source: str = key("Hub id or folder name of the source")
    experts: str = key("Hub id or folder name of the experts' checkpoint")
    digests: dict[str, str] = key("Digests of both")
    repair_router: bool = key("Whether routers were multiplied by the ratio of the norms")


class Settings(Part):
    """The recipe and the machine."""

    recipe: dict[str, Any] = key("The resolved recipe; see docs/reference/recipe.md")
    hash: str = key("SHA-256 of the recipe and of the sets that it names, hexadecimal")
    published_hash: str = key("The same of the recipe beside the checkpoint, whose sets have locks that the run added")
    file: str = key("File name of the recipe")
    machine: dict[str, Any] = key("Device, threads and versions on which the output's bytes depend")


class Tally(Part):
    """Samples and tokens of one category or language."""

    samples: int = key("Samples", "samples")
    tokens: int = key("Tokens that were used, after truncation", "tokens")
    truncated: int = key("Samples that were cut at the sequence length", "samples")
    truncated_tokens: int = key("Tokens that were cut off", "tokens")


class Dropped(Part):
    """Rows of one data source that were skipped for the same reason."""

    source: str = key("The data set or file")
    reason: str = key("Why")
    count: int = key("How many rows", "rows")
    first: str = key("Where the first one is")
    left_out: bool = key("True where the row is usable but its language is not listed by the set", default=False)


class NotRendered(Part):
    """Parts of one data source's turns that the chat template does not show."""

    source: str = key("The data set or file")
    part: str = key("Which part, such as thoughts, call or system turn")
    count: int = key("How many", "parts")


class Calibration(Part):
    """The calibration set as it was used."""

    name: str = key("Name of the set")
    digest: str = key("SHA-256 over the categories and token ids of all samples, hexadecimal")
    sequence_length: int = key("Length at which samples are cut", "tokens")
    lengths: list[int] = key("All lengths at which samples are cut, of the set and of its long sources", "tokens")
    samples: int = key("Samples", "samples")
    tokens: int = key("Tokens of all samples, after truncation", "tokens")
    long_samples: int = key("Samples of long sources", "samples")
    long_tokens: int = key("Tokens of long sources", "tokens")
    truncated_samples: int = key("Samples that were cut", "samples")
    truncated_tokens: int = key("Tokens that were cut off", "tokens")
    categories: dict[str, Tally] = key("By category")
    dropped: list[Dropped] = key("Rows that were skipped")
    not_rendered: list[NotRendered] = key("Parts of turns that the chat template does not show", default=[])
    versions: list[str] = key("Revision or SHA-256 of each data source, in the order of the set")
    lock: bool = key("Whether a lock file fixed the revisions")
    notes: list[str] = key("Remarks made while the set was read")
    datasets: list[str] = key("Hub data sets of which samples were used")
    licences: dict[str, str] = key("Licence of each data set and file of which samples were used; empty where unknown")
    languages: dict[str, dict[str, int]] = key("Texts in each listed programming and spoken language", "samples")
    asked_for: dict[str, dict[str, int]] = key("Samples whose prompt asks for a language, in any", "samples")
    by_language: dict[str, dict[str, Tally]] = key("Texts in each language, with tokens and truncation")
    drawn: Drawn | None = maybe("What was drawn; absent where the recipe takes the whole set")


class ActionTotals(Part):
    """Tensors and bytes with one action."""

    tensors: int = key("Source tensors", "tensors")
    bytes_before: int = key("Bytes in the source", "bytes")
    bytes_after: int = key("Bytes in the output", "bytes")


class TensorKind(ActionTotals):
    """Tensors of one kind and action."""

    kind: str = key("Tensor name with * for layer and expert numbers")
    action: str = key("keep, rename, carry, convert, quantize, drop, fold or compensate")


class MtpLayers(Part):
    """Layers that predict further tokens (MTP), passed through."""

    layers: list[int] = key("Their numbers")
    bytes: int = key("Their bytes in the source", "bytes")
    form: str | None = maybe("Format of their routed experts; absent if these are not quantized")


class Plan(Part):
    """Totals of the plan for the source's tensors."""

    layers: int = key("Decoder layers", "layers")
    dense_layers: list[int] = key("Layers without routed experts")
    experts_per_layer: int = key("Routed experts in a layer", "experts")
    quantized_matrices: int = key("Matrices of experts that are quantized, or converted, in all", "tensors")
    kept_attention_tensors: int = key("Attention tensors passed through", "tensors")
    actions: dict[str, ActionTotals] = key("Totals by action")
    kinds: list[TensorKind] = key("Totals by kind of tensor, in the order of the plan")
    source_bytes: int = key("Bytes of the source's tensors", "bytes")
    expert_bytes: int = key("Bytes of these experts in the output", "bytes")
    output_bytes: int = key("Bytes of all shards and the index", "bytes")
    index_bytes: int = key("Bytes of the index", "bytes")
    layer_source_bytes: int = key("Source bytes of the largest layer", "bytes")
    kept_forms: list[str] | None = maybe("Formats of all that is quantized besides routed experts; absent without any")
    attention_form: str | None = maybe("Format of attention in the output; absent if it is not quantized")
    attention: str | None = maybe("What other linear modules were converted to: bf16, fp8, fp8-block; absent for keep")
    kv_cache: list[int] | None = maybe("Layers with scales for an FP8 cache of keys and values; absent without any")
    mtp: MtpLayers | None = maybe("Layers for speculative decoding; absent without any")


class Candidate(Part):
    """A scheme that a budget may choose."""

    scheme: str = key("Bits and group size")
    bits_per_weight: float = key("With the scales", "bits")
    tensor_parallel: list[int] = key("Numbers of GPUs over which vLLM could divide an expert", "GPUs")
    layer_bytes: list[int] = key("Smallest and largest shard of a layer", "bytes")
    output_bytes: int = key("All shards, if every layer had it", "bytes")


class ChosenLayer(Part):
    """The scheme of one layer and the measurements behind it."""

    layer: int = key("Number of the layer")
    scheme: str = key("Bits and group size")
    bits: int = key("Bits of a weight", "bits")
    group_size: int = key("Weights that share a scale", "weights")
    bytes: int = key("Size of its shard", "bytes")
    kl: Number = key("KL of the probe, in which the first layer with experts is perturbed", "nats")
    disturbance: Number = key("Squared relative perturbation of the probe's states after this layer")
    loss: dict[str, Number] = key("Predicted KL by scheme", "nats")
    error: dict[str, Number] = key("Squared relative error of the experts' outputs by scheme")
    by_matrix: dict[str, dict[str, Number]] = key("The same when one matrix alone is rounded")
    experts: int = key("Experts that were measured", "experts")


class Budget(Part):
    """A recipe's budget, and what it is to be spent on."""

    candidates: list[Candidate] = key("Possible schemes, smallest first")
    limit: float | int = key("The recipe's budget, in `unit`")
    unit: Literal["bytes", "bits per weight"] = key("Unit of the limit")
    above_the_largest: bool = key("Whether the budget allows more than the largest scheme needs")


class PlannedSchemes(Budget):
    """Budget as `quantize plan` prints it, before a run has chosen schemes."""

    planned: str = key("The scheme in every layer of which the plan's sizes are")


class Schemes(Budget):
    """The choice of bits and group sizes within a budget."""

    chosen: str = key("How many layers have which scheme")
    output_bytes: int = key("All shards", "bytes")
    bits_per_weight: float = key("Mean over all experts, with scales", "bits")
    predicted_kl: Number = key("Sum of the layers' predicted KL", "nats")
    uniform: str = key("The candidate with the least predicted KL that fits in every layer")
    gain: float = key("How much less KL the best mixture is predicted to have than it", "share")
    gain_interval: list[float] = key("Ends of its 95 % interval; chosen if above 0", "share")
    coarsest: str = key("The smallest candidate")
    by_matrix: dict[str, float] = key("Each matrix's share of the loss with the coarsest scheme", "share")
    layers: list[ChosenLayer] = key("Layer by layer")


class SolvingErrors(Part):
    """Errors of a layer of which none are known: it has no experts, or llmcompressor searched no scales."""

    @model_serializer(mode="wrap")
    def _as_given(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All keys that were given, of which None stands for an infinite error."""
        return {name: value for name, value in written(self).items() if name in self.model_fields_set}

    @property
    def left_in_norm(self) -> float | None:
        """Share of the search's loss for norm to router, w1, w3 that is left with the best scales, if that is known."""
        return None

    @property
    def left_in_down(self) -> float | None:
        """The same for w3 to w2."""
        return None


class GramErrors(SolvingErrors):
    """Errors before and after the search and the rounding, by the engine gram."""

    norm_search_before: Number = maybe("AWQ's objective for norm to router, w1, w3 without scales")
    norm_search_after: Number = maybe("The same with the best scales")
    down_search_before: Number = maybe("AWQ's objective for w3 to w2 without scales, mean of the experts")
    down_search_after: Number = maybe("The same with the best scales")
    gate_up_rounding: Number = key("Error of the outputs of w1 and w3 on the calibration inputs", "relative")
    down_rounding: Number = key("Error of the outputs of w2 on the calibration inputs", "relative")
    expert_tokens: float = key("Fewest calibration tokens that an expert saw", "tokens")

    @property
    def left_in_norm(self) -> float | None:
        """See `SolvingErrors`."""
        return _left(self.norm_search_before, self.norm_search_after)

    @property
    def left_in_down(self) -> float | None:
        """See `SolvingErrors`."""
        return _left(self.down_search_before, self.down_search_after)


class LlmcompressorErrors(SolvingErrors):
    """Errors before and after the search, by the engine llmcompressor."""

    search_before: Number = maybe("Its loss for the norm without scales")
    search_after: Number = maybe("The same with the best scales")
    search_down_before: Number = maybe("Its loss for w3 to w2 without scales, mean of the experts")
    search_down_after: Number = maybe("The same with the best scales")
    expert_tokens: float = key("Calibration tokens that every expert saw", "tokens")

    @property
    def left_in_norm(self) -> float | None:
        """See `SolvingErrors`."""
        return _left(self.search_before, self.search_after)

    @property
    def left_in_down(self) -> float | None:
        """See `SolvingErrors`."""
        return _left(self.search_down_before, self.search_down_after)


def _left(before: float | None, after: float | None) -> float | None:
    return after / before if before and after is not None else None


class Closeness(Part):
    """Relative errors of a layer's quantized experts against the source's."""

    median: Number = key("Median over the experts", "relative")
    worst: Number = key("Largest", "relative")
    worst_expert: int = key("Whose it is")


class UnderRouted(Part):
    """Experts with too few routed tokens for the recipe's full routed_weight."""

    full_share_at: int = key("Routed tokens from which the full weight holds", "tokens")
    experts: int = key("Experts with fewer", "experts")
    smallest_share: float = key("Smallest routed weight that was used", "share")


class Layer(Part):
    """One layer of a run."""

    layer: int = key("Its number")
    proof: float = key("Distance from transformers' own call of the layer, as a part of its largest change of a state")
    seconds: dict[str, float] = key("Time by phase", "seconds")
    error: GramErrors | LlmcompressorErrors | SolvingErrors = key(
        "Errors of search and rounding, by the engine; empty for a layer without experts"
    )
    fallbacks: list[str] = key("One line for each expert that did not get the method asked for")
    leaning: UnderRouted | None = key("Under-routed experts; None where all tokens count alike")
    closeness: Closeness | None = key("Distance of the written experts from the source's; None without experts")
    kv_peaks: list[Number] | None = maybe("Largest magnitude of its keys and of its values, if scales follow from it")


class StitchedLayer(Part):
    """One layer of a stitch."""

    layer: int = key("Its number")
    folded: int = key("Channels of the norm that were divided by a scale", "channels")
    router: str = key("State of the router in the experts' checkpoint")
    error: Number = key("Largest error of the probed experts against the source's times the ratio of norms", "relative")
    error_unscaled: Number = key("The same against the source's experts without the ratio", "relative")


class AuditFigures(Part):
    """The output's files compared with the source."""

    tensors: int = key("Source tensors accounted for", "tensors")
    kept_bytes_equal: bool = key("Whether all passthrough tensors have the source's bytes")
    kept_tensors: int = key("Passthrough tensors compared by SHA-256", "tensors")
    differences: list[str] = key("One line each; empty if all is as planned")
    weight_error: list[Number] = key("Largest error of an expert's matrix by layer", "relative")
    digests_checked: bool = key("Whether the files were compared with the digests taken when they were written")
    converted_matrices: int | None = maybe("Converted ones, compared bit by bit; absent without any", "tensors")
    values: int | None = maybe("Values in them, where experts are converted: each was compared; else absent", "values")


class Audit(AuditFigures):
    """The audit of a finished output, with the digests of its shards."""

    digests: dict[str, ShardDigest] = key("By file name", default={})


class Finding(Part):
    """Something that a serving engine would read otherwise than it is stored."""

    severity: str = key("error, or warning")
    engine: str = key("vLLM, SGLang or transformers")
    problem: str = key("What is stored")
    consequence: str = key("What the engine makes of it")
    where: str = key("The tensor or key; the first of several")
    count: int = key("How many places")
    places: list[str] | None = maybe("All of them; only in what `verify --json` prints")


class Engines(Part):
    """Compatibility of the output with serving engines."""

    checked: bool | None = maybe("False where the program had no rules of theirs; absent where it had")
    schemes: dict[str, dict[str, str]] = key("By engine and kind of module; `stored` is how the tensors are stored")
    findings: list[Finding] = key("Errors first, then warnings")
    tensor_parallel: dict[str, str] = key("By number of GPUs: `ok`, or why vLLM cannot divide the model")
    kernels: dict[str, dict[str, str]] = key("By server and card, and kind of module: the kernel, or why it is refused")
    ktransformers: str | None = maybe("Whether KTransformers takes the experts; absent where SGLang lacks the family")


class Fit(Part):
    """The model on some GPUs, by arithmetic."""

    cards: str = key("Number and memory of the GPUs")
    tensor_parallel: int = key("Tensor-parallel ranks", "GPUs")
    pipeline_parallel: int = key("Pipeline-parallel ranks", "GPUs")
    kv: str = key("Type of the KV cache: auto (16 bits) or fp8")
    context: int = key("Context for which the cache is counted", "tokens")
    utilisation: float = key("vLLM's --gpu-memory-utilization", "share")
    budget: int = key("Memory that vLLM may use on a GPU", "bytes")
    weights: int = key("Weights on the fullest GPU", "bytes")
    activations: int = key("Activations", "bytes")
    runtime: int = key("CUDA context, kernels, buffers", "bytes")
    kv_cache: int = key("KV cache for the context", "bytes")
    left: int = key("What is left", "bytes")
    longest: int = key("Longest context that fits", "tokens")
    fits: bool = key("Whether the context fits")


class Serving(Part):
    """Instructions and memory estimates for serving the output."""

    servers: list[str] = key("Servers that know the family")
    parsers: Options = key("Options of vLLM; true for one without a value")
    sglang: Options | None = key("Options of SGLang; None where it does not know the family")
    transformers: bool | None = maybe("False where transformers does not know the model type; absent otherwise")
    sampling: dict[str, float | int] = key("Defaults of the source's generation_config.json")
    longest: int = key("Context of the model", "tokens")
    fits: list[Fit] = key("Common GPUs")
    assumptions: list[str] = key("On which the arithmetic rests")
    cards_unknown: str | None = maybe("Why there is no arithmetic; absent where there is")


class CardRecord(Part):
    """The model card as it was written."""

    front_matter: dict[str, Any] = key("The YAML at its head")
    sha256: str = key("SHA-256 of its text, hexadecimal")


NO_CARD = CardRecord(front_matter={}, sha256="")  # of a report whose files are not recorded yet


class Seconds(Part):
    """Durations."""

    this_process: float = key("Of the last process, with verification and evaluation", "seconds")
    layers: float = key("Of all layers, over all interruptions", "seconds")
    measuring: float | None = maybe("Of the measurements for a budget; absent without one", "seconds")


class Published(Part):
    """Arguments of `quantize publish` or `quantize run --publish-as-you-go`."""

    repo: str = key("The repository on the Hub")
    license: str | None = maybe("Licence; absent if none was given")
    base_model: str | None = maybe("Base model; absent if none was given")
    removed: list[str] | None = maybe("Shards that are in the repository alone; absent if all were here")


class Forced(Part):
    """A publication in spite of failed checks."""

    reason: str | None = key("The user's reason")
    problems: list[str] = key("What failed")


class Planned(Part):
    """Facts about an output before its first tensor is written."""

    source: Source = key("The source")
    plan: Plan = key("The plan")
    versions: dict[str, str] = key("Versions of the packages and of Python")
    notes: list[str] = key("What a reader should know")
    architecture: dict[str, Any] | None = maybe("What probing the layers found; absent where facts are kept")
    serving: Serving = key("How to serve it")
    published: Published | None = maybe("Its publication; absent before")


class Report(Planned):
    """Fields that the reports of a run and of a stitch have in common."""

    audit: Audit = key("The audit")
    gates: list[Gate] = key("All gates; the output is as asked for if all passed")
    consumers: Engines | None = maybe("Serving engines; absent if the output could not be opened")
    files: list[str] = key("Names of all files of the output but report.json")
    sha256: dict[str, str] = key("Of each file but shards, model card and report.json, hexadecimal")
    card: CardRecord = key("The model card")
    forced: Forced | None = maybe("Its forced publication; absent otherwise")
    seal: str | None = maybe("SHA-256 over everything else in the report, hexadecimal")
    already_done: bool | None = maybe("True in what a command prints that found its output finished; never in the file")


class StitchReport(Report):
    """report.json of `quantize stitch`."""

    stitched: Stitched = key("The settings")
    experts: PackedExperts = key("Where the experts come from")
    examined: list[str] = key("What was found out about norms and routers, one line each")
    layers: list[StitchedLayer] = key("Layer by layer")


class PlannedByRecipe(Planned):
    """Facts about a run of a recipe, which quantizes or converts, before its first layer."""

    settings: Settings = key("The recipe and the machine")


class PlannedRun(PlannedByRecipe):
    """Facts about a run that quantizes before its first layer."""

    calibration: Calibration = key("The calibration set")


class RunReport(PlannedRun, Report):
    """report.json of `quantize run` without held-out texts."""

    coverage: Coverage = key("Tokens by expert")
    layers: list[Layer] = key("Layer by layer")
    seconds: Seconds = key("Durations")
    peak_memory_bytes: int = key("Most memory that the process and its device used", "bytes")
    schemes: Schemes | None = maybe("Choice within a budget; absent without one")


class MeasuredRunReport(RunReport, Fidelity):
    """report.json of `quantize run` with held-out texts: the keys of a RunReport and of a Fidelity."""


class ConvertedLayer(Part):
    """A layer of a conversion, or, in the journal, another part of the source."""

    layer: int | None = key("Its number; None, in the journal alone, for what lies outside the layers")
    seconds: dict[str, float] = key("Time by phase", "seconds")
    matrices: int = key("Converted matrices", "tensors")
    values: int = key("Values in them, each equal to the source's", "values")


class Conversion(Part):
    """The proof of a conversion: every value that its matrices hold is the source's."""

    to: str = key("What the experts were converted to, as the recipe names it")
    before: list[str] = key("How the source stores the matrices that were converted")
    matrices: int = key("Converted matrices, of experts and, as the recipe's `attention` says, others", "tensors")
    values: int = key("Values in them, compared when they were written", "values")
    equal: Literal[True] = key("That all are equal: else there is no output")


class ConversionReport(PlannedByRecipe, Report):
    """report.json of `quantize run` with `experts.convert`: no texts, so neither calibration nor fidelity."""

    conversion: Conversion = key("What was converted, and that all values are equal")
    layers: list[ConvertedLayer] = key("Decoder layer by decoder layer")
    seconds: Seconds = key("Durations")
    peak_memory_bytes: int = key("Most memory that the process and its device used", "bytes")


def checked(report: Mapping[str, Any]) -> RunReport | StitchReport | ConversionReport:
    """A report read from JSON; pydantic.ValidationError without the schema, as those of other versions may be."""
    if "stitched" in report:
        return StitchReport.model_validate(report)
    if "conversion" in report:
        return ConversionReport.model_validate(report)
    return (MeasuredRunReport if "kl" in report else RunReport).model_validate(report)
