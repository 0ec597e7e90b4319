"""The figures of fidelity: how close a candidate is to its source, in report.json and the output of `quantize eval`."""

from __future__ import annotations

from quantizers.system.keys import Number, Part, key, maybe


class Perplexity(Part):
    """Perplexity on held-out text."""

    source: Number = key("Of the source")
    candidate: Number = key("Of the output")
    increase: Number = key("Candidate / source - 1", "relative")


class BitsPerByte(Part):
    """Loss over the UTF-8 bytes of the scored tokens."""

    source: Number = key("Of the source; None if the scored tokens have no bytes", "bits")
    candidate: Number = key("Of the output; None if the scored tokens have no bytes", "bits")


class Kl(Part):
    """KL divergence over the whole vocabulary."""

    mean: Number = key("Mean over the scored positions", "nats")
    median: Number = key("Median", "nats")
    p99: Number = key("99th percentile", "nats")
    p999: Number = key("99.9th percentile", "nats")
    max: Number = key("Largest", "nats")


class Interval(Part):
    """95 % intervals over texts, by percentile bootstrap: lower and upper end."""

    kl: list[Number] = key("Of the mean KL", "nats")
    top1: list[Number] = key("Of top-1", "share")
    increase: list[Number] = key("Of the increase of perplexity", "relative")


class Figures(Part):
    """Fidelity over some texts."""

    samples: int = key("Texts", "texts")
    tokens: int = key("Scored tokens", "tokens")
    perplexity: Perplexity = key("Perplexity")
    bits_per_byte: BitsPerByte = key("Bits per byte")
    kl: Kl = key("KL(source || candidate)")
    reverse_kl: Kl = key("KL(candidate || source)")
    top1: Number = key("How often both find the same token most likely", "share")
    interval: Interval | None = key("Intervals; None with a single text")


class Router(Part):
    """Share of the source's expert choices that the candidate's routers make too."""

    agreement: list[Number] = key("By layer; None for a layer without experts", "share")
    min: Number = key("In the worst layer", "share")


class TextFigures(Part):
    """One held-out text."""

    place: str = key("Its row in the set, such as `./texts.jsonl:12`; in a run a local file has its published name")
    category: str = key("Its category")
    tokens: int = key("Scored tokens", "tokens")
    kl: Number = key("Mean KL", "nats")
    max: Number = key("Largest KL", "nats")
    position: int = key("Where that is: the position of the predicted token, the text's first being 0", "tokens")


class PartFigures(Figures):
    """Fidelity over the short or the long texts, with details."""

    longest: int = key("Tokens of the longest text", "tokens")
    router: Router = key("Routing")
    hidden_error: list[Number] = key("Error of the hidden states after each layer", "relative")
    categories: dict[str, Figures] = key("By category")
    families: dict[str, Figures] = key("By family of categories: `code` sums up `code/rust` and the like")
    worst: TextFigures = key("The text with the largest mean KL")
    per_text: list[TextFigures] = key("Text by text, in the order of the set")


class MeanKl(Part):
    """KL divergence over the whole vocabulary, of one band of positions."""

    mean: Number = key("Mean over the scored positions", "nats")


class Band(Part):
    """A band of positions in the texts."""

    name: str = key("In words")
    start: int = key("First position", "tokens", written="from")
    to: int | None = key("Position after the last; None for the open end", "tokens")
    samples: int = key("Texts that reach it", "texts")
    tokens: int = key("Scored tokens", "tokens")
    perplexity: Perplexity = key("Perplexity")
    kl: MeanKl = key("KL(source || candidate)")
    reverse_kl: MeanKl = key("KL(candidate || source)")
    top1: Number = key("How often both find the same token most likely", "share")


class Cut(Part):
    """Held-out texts that are longer than the model's positions; they are cut there."""

    texts: int = key("How many were cut", "texts")
    tokens: int = key("Tokens that were cut off", "tokens")
    positions: int | None = maybe("The model's max_position_embeddings; absent where that is not known")


class HeldOutSet(Part):
    """The set on which fidelity was measured."""

    name: str = key("Its name")
    digest: str = key("SHA-256 over its categories and token ids, hexadecimal")
    past_the_model: Cut = key("What was cut at the model's last position, as far as that is known")


class OnCard(Part):
    """Fidelity as vLLM's kernels on a kind of card would compute it; over the short texts where there are long ones."""

    served: Figures = key("The candidate there against the source there")
    card_alone: Figures = key("The source there against the source as stored: what the card alone does")
    from_stored: Figures = key("The candidate there against the source as stored")
    kernels: dict[str, str] = key("The kernel for each kind of matrix, and what it rounds")


class KvCache(Part):
    """Fidelity with keys and values in an FP8 cache; over the short texts where there are long ones."""

    calibrated: Figures = key(
        "With the checkpoint's scales, against the source as stored, whose cache is not quantized"
    )
    ones: Figures = key("The same with scales of 1, which servers take where a checkpoint has none")


class WeightError(Part):
    """Distance of a layer's weights from the source's."""

    experts: Number = key("Of the routed experts", "relative")
    attention: Number = key("Of attention", "relative")


class LayerFigures(Part):
    """A layer of a candidate compared with the source's; a journal has it, and a report's lists are made of it."""

    agreement: float | None = key("Share of the source's expert choices that it makes too; None without experts")
    hidden_error: float = key("‖h_candidate − h_source‖ / ‖h_source‖ of the states that leave it", "relative")
    long: LayerFigures | None = maybe("The same of the long texts, where these are reported separately")
    weight_error: WeightError | None = maybe("Distance of its weights from the source's, if it was measured")


class Fidelity(PartFigures):
    """Fidelity of a candidate; of the short texts at this level where there are long ones as well."""

    evaluated_on: HeldOutSet = key("The held-out set")
    long: PartFigures | None = maybe("The long texts; absent where all texts are of one kind")
    positions: list[Band] = key("By position in the long texts, or else in all")
    weight_error: list[WeightError] | None = maybe("Error of the weights by layer; in an `eval`")
    as_served: dict[str, OnCard] | None = maybe("By card, see `--as-served`; absent where none was asked for")
    kv_cache: KvCache | None = maybe("With an FP8 cache; absent for a checkpoint without scales for it")


class EvaluatedCandidate(Fidelity):
    """A candidate of `quantize eval`."""

    model: str = key("As it was given")


class Difference(Part):
    """Mean KL of a candidate minus that of the first, over some texts."""

    texts: int = key("Texts", "texts")
    tokens: int = key("Scored tokens", "tokens")
    first: float = key("Mean KL of the first candidate", "nats")
    other: float = key("Mean KL of this candidate", "nats")
    difference: float = key("Other minus first; negative is closer to the source", "nats")
    interval: list[float] | None = key("95 % bootstrap-t interval; None with too few texts", "nats")


class PartDifference(Difference):
    """The same with details."""

    categories: dict[str, Difference] = key("By category")
    families: dict[str, Difference] = key("By family of categories")


class PairedCandidate(PartDifference):
    """A candidate of `quantize eval` against the first one."""

    model: str = key("As it was given")
    against: str = key("The first")
    note: str = key("How to read it")
    long: PartDifference | None = maybe("Over the long texts; absent where all texts are of one kind")


class EvalReport(Part):
    """Output of `quantize eval --json`."""

    source: str = key("As it was given")
    candidates: list[EvaluatedCandidate] = key("In the order of the command line")
    notes: list[str] = key("What a reader should know")
    paired: list[PairedCandidate] | None = maybe("Each candidate but the first; absent with a single one")
