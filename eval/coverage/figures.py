"""The figures of coverage and of saliency, in report.json and in what `quantize coverage` prints."""

from __future__ import annotations

from quantizers.system.keys import Part, key, maybe


class Gate(Part):
    """A check with a limit."""

    name: str = key("audit, consumers (serving engines), coverage, entropy, perplexity or kl")
    passed: bool = key("Whether the value respects the limit")
    value: float | int | None = key("What was found; None where it is not finite")
    limit: float | int = key("The limit")
    meaning: str = key("What the value is")
    at_least: bool | None = maybe("True where the value must not be below the limit; absent otherwise")


class LayerCoverage(Part):
    """Routed tokens of the experts of one layer."""

    layer: int = key("Its number")
    min: int = key("Fewest", "tokens")
    median: float = key("Median", "tokens")
    uncovered: int = key("Experts below the minimum", "experts")
    worst_expert: int = key("The expert with the fewest")
    entropy: float = key("Entropy of the load; 1 is even, 0 is one expert alone", "share")
    routed_tokens: list[int] = key("Of each expert", "tokens")


class AllExpertPass(Part):
    """The pass in which every expert sees every token."""

    min: int = key("Fewest tokens that an expert saw", "tokens")
    tokens: int = key("Tokens of the set", "tokens")


class Coverage(Part):
    """Tokens that the router sent to each expert."""

    min_routed_tokens: int = key("Routed tokens from which an expert counts as covered", "tokens")
    min: int = key("Fewest routed tokens of an expert", "tokens")
    median: float = key("Median over all experts of all layers", "tokens")
    pairs: int = key("Pairs of layer and expert", "pairs")
    uncovered: int = key("Pairs below the minimum", "pairs")
    uncovered_pairs: list[list[int]] = key("Layer and expert of each of them")
    min_entropy: float = key("Entropy of the load in the most uneven layer", "share")
    per_layer: list[LayerCoverage] = key("Layer by layer")
    routed_by_category: dict[str, int] = key("Routed tokens by category, summed over layers and experts", "tokens")
    forced: AllExpertPass | None = maybe("All-expert calibration; absent with the engine llmcompressor")


class Drawn(Part):
    """Tokens that the recipe asks for, and the size of the whole set that they are drawn from."""

    asked: int = key("Tokens that the recipe asks for", "tokens")
    samples: int = key("Samples in the whole set", "samples")
    tokens: int = key("Tokens in the whole set", "tokens")
    cut: int = key("Samples cut because the share of their category was used up", "samples")


class WorstExpert(Part):
    """One of the experts with the fewest routed tokens."""

    layer: int = key("Its layer")
    expert: int = key("Its number")
    tokens: int = key("Its routed tokens", "tokens")
    share_of_even: float = key("The same relative to an even load", "relative")
    sent_by: dict[str, float] = key("Categories that send most, per thousand of their tokens", "tokens")
    nearly_sent_by: dict[str, float] = key("Categories that nearly send most, per thousand of their tokens", "tokens")


class LeastSalientExpert(Part):
    """One of the experts with the least saliency relative to the mean of their layer."""

    layer: int = key("Its layer")
    expert: int = key("Its number")
    score: float = key("Its score")
    of_mean: float = key("The same relative to the mean of the layer's experts", "relative")
    tokens: int = key("Its routed tokens", "tokens")
    most_in: dict[str, float] = key(
        "Categories in which it scores most, relative to the layer's mean there", "relative"
    )


class LayerSaliency(Part):
    """The saliency of the experts of one layer."""

    layer: int = key("Its number")
    block: str = key("transformers' module that holds its router and experts")
    scores: list[float] = key("Of each expert; 0 without tokens")


class LeastShares(Part):
    """The share of a category's weighted norms that comes from the experts which score least over all texts."""

    quarter: float = key("From a quarter of each layer's experts", "share")
    half: float = key("From half of them", "share")


class CategorySaliency(Part):
    """The saliency over the texts of one category."""

    without_tokens: int = key("Pairs of layer and expert without tokens of it", "pairs")
    in_least: LeastShares = key("What pruning would take from it")
    scores: list[list[float]] = key("By layer and expert")


class Saliency(Part):
    """REAP's scores: the mean of routing weight times L2 norm of the output over an expert's routed tokens."""

    without_tokens: list[list[int]] = key("Layer and expert of those without tokens, which score 0")
    least: list[LeastSalientExpert] = key("Those that score least")
    per_layer: list[LayerSaliency] = key("Layer by layer")
    by_category: dict[str, CategorySaliency] = key("By category")


class CoverageReport(Coverage):
    """Output of `quantize coverage --json` for one set."""

    model: str = key("As it was given")
    set: str = key("Name of the set")
    tokens: dict[str, int] = key("Tokens by category", "tokens")
    tied_choices: int = key("Choices that were a tie", "choices")
    worst: list[WorstExpert] = key("The experts with the fewest tokens")
    counts: dict[str, list[list[int]]] = key("By category: routed tokens by layer and expert", "tokens")
    gates: list[Gate] = key("The gates on coverage")
    drawn: Drawn | None = maybe("What was drawn; absent where the whole set is used")
    saliency: Saliency | None = maybe("What the experts contribute; with --saliency only")


# Two sets -----------------------------------------------------------------------------------------------------------


class ExpertShare(Part):
    """An expert whose share of the routed tokens differs."""

    layer: int = key("Its layer")
    expert: int = key("Its number")
    before: int = key("Its routed tokens in the first set", "tokens")
    after: int = key("Its routed tokens in the other", "tokens")
    before_of_even: float = key("Its share in the first set, relative to an even load", "relative")
    after_of_even: float = key("Its share in the other, relative to an even load", "relative")


class LayerLoad(Part):
    """The load of a layer's experts with one set."""

    routed_tokens: list[int] = key("Of each expert", "tokens")
    shares: list[float] = key("Of each expert, of the layer's routed tokens", "share")
    entropy: float = key("Entropy of the load; 1 is even, 0 is one expert alone", "share")


class LayerRouting(Part):
    """The load of a layer's experts with both sets."""

    layer: int = key("Its number")
    before: LayerLoad = key("With the first set")
    after: LayerLoad = key("With the other")
    entropy_change: float = key("Entropy with the other minus that with the first", "share")
    moved: float = key("Share of the routed tokens that go to other experts", "share")


class SetName(Part):
    """A calibration set by its names."""

    label: str = key("What it is called here")
    name: str = key("Name of the set")
    file: str = key("Its file")


class RoutedSet(SetName):
    """The routed tokens of one set, of all its draws together."""

    min: int = key("Fewest routed tokens of an expert", "tokens")
    median: float = key("Median over all experts of all layers", "tokens")
    uncovered: int = key("Pairs of layer and expert below the minimum", "pairs")
    uncovered_at_common: int = key("The same if the set had `common_tokens`", "pairs")
    pairs: int = key("Pairs of layer and expert", "pairs")
    min_entropy: float = key("Entropy of the load in the most uneven layer", "share")
    tokens: dict[str, int] = key("Tokens by category", "tokens")
    gates: list[Gate] = key("The gates on coverage")


class CategoryCoverage(Part):
    """The experts to which the texts of one category alone send enough tokens, at equal size of the sets."""

    category: str = key("The category, such as `code/rust`")
    won: int = key("Pairs of layer and expert that it covers in the other set only", "pairs")
    lost: int = key("Pairs that it covers in the first set only", "pairs")


class RoutingChange(Part):
    """Difference in expert load between two sets, by shares, as `quantize coverage --compare` counts it."""

    common_tokens: int = key("Tokens of the smaller set, at which coverage is compared", "tokens")
    min_routed_tokens: int = key("Routed tokens from which an expert counts as covered", "tokens")
    won: list[list[int]] = key("Layer and expert of those that only the other set covers")
    lost: list[list[int]] = key("Layer and expert of those that only the first set covers")
    won_by: list[dict[str, int]] = key("For each of `won`, tokens by the categories of the other that send most")
    lost_by: list[dict[str, int]] = key("For each of `lost`, tokens by the categories of the first that send most")
    languages: list[CategoryCoverage] = key("Category by category, most changes first")
    fewer: list[ExpertShare] = key("Experts whose share shrinks most")
    more: list[ExpertShare] = key("Experts whose share grows most")
    per_layer: list[LayerRouting] = key("Layer by layer")
    before: RoutedSet = key("The first set")
    after: RoutedSet = key("The other")


class CoverageComparison(RoutingChange):
    """Output of `quantize coverage --compare --json`."""

    model: str = key("As it was given")
