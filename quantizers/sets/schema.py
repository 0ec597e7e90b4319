"""The schema of what `quantize compare` and `quantize calibration why` print with --json."""

from __future__ import annotations

from typing import Literal

from quantizers.eval.coverage.figures import RoutingChange
from quantizers.eval.fidelity.figures import HeldOutSet, Perplexity
from quantizers.system.keys import Number, Part, key

from .estimate import Verdict

FieldKind = Literal["family", "category", "long"]


class ScoredText(Part):
    """A held-out text."""

    place: str = key("Its row in the set, such as `./texts.jsonl:12`")
    category: str = key("Its category")
    tokens: int = key("Scored tokens", "tokens")
    long: bool = key("Whether it is a long text")


class Estimate(Part):
    """A mean over draws and texts."""

    mean: Number = key("The mean, in the unit of what it is of")
    interval: list[float] | None = key("Its interval over draws and texts; None with too few texts")


class KlEstimate(Estimate):
    """Mean KL(source || output) of a set."""

    per_draw: list[Number] = key("Mean of each draw", "nats")


class PerplexityEstimate(Perplexity):
    """Perplexity of a set's outputs."""

    interval: list[float] | None = key("Interval of the increase; None with too few texts", "relative")


class LayerError(Part):
    """Error of the hidden states after a layer, over the draws."""

    mean: Number = key("Mean", "relative")
    low: Number = key("Of the draw with the least", "relative")
    high: Number = key("Of the draw with the largest", "relative")


class FieldFigures(Part):
    """A set's outputs on some of the held-out texts."""

    kind: FieldKind = key("A family of categories, one category, or the long texts")
    texts: int = key("Texts", "texts")
    tokens: int = key("Scored tokens", "tokens")
    kl: Estimate = key("KL(source || output)", "nats")


class SetFigures(Part):
    """A calibration set, and what the outputs that were made with it are like."""

    label: str = key("What it is called here; short, and distinct from the others")
    name: str = key("Name of the set")
    file: str = key("Its file")
    draws: int = key("Draws that differ; 1 where each is the whole set", "draws")
    samples: list[int] = key("Samples of each draw", "samples")
    tokens: list[int] = key("Tokens of each draw", "tokens")
    kl: KlEstimate = key("KL(source || output)", "nats")
    kl_by_text: list[list[Number]] = key("Mean KL by draw and text, in the order of `texts`", "nats")
    top1: Estimate = key("How often source and output find the same token most likely", "share")
    perplexity: PerplexityEstimate = key("Perplexity")
    router: Estimate | None = key("The source's choices of experts that the output makes too; None if unknown", "share")
    hidden_error: list[LayerError] = key("Error of the hidden states after each layer", "relative")
    fields: dict[str, FieldFigures] = key("By family, category, and the long texts")


class Change(Part):
    """A relative change of mean KL, and what it says."""

    change: Number = key("Mean KL / mean KL before - 1", "relative")
    interval: list[float] | None = key(
        "Its interval over draws and texts, of this change alone; None with too few texts", "relative"
    )
    p: float = key("Probability of such a change where there is no difference; 1 with too few texts", "share")
    adjusted: float = key(
        "p adjusted by Holm for all that are tested together; the verdict's, and the printed p", "share"
    )


class FieldChange(Change):
    """One set against another on some of the held-out texts; `change` is other / first - 1."""

    name: str = key("Of the family or category, or the long texts")
    kind: FieldKind = key("Which of them")
    texts: int = key("Texts", "texts")
    first: Number = key("Mean KL of the first set", "nats")
    other: Number = key("Mean KL of the other", "nats")
    verdict: Verdict = key("Of the other")


class SetPair(Change):
    """One set against another; `change` is that of the other."""

    first: str = key("Label of the first")
    other: str = key("Label of the other")
    detectable: Number = key("Change that would be seen with 80 % probability; None if unknown", "relative")
    verdict: Verdict = key("Of the other")
    words: str = key("The same as a sentence")
    fields: list[FieldChange] = key("By family, category, and the long texts")
    routing: RoutingChange = key("Tokens by expert")


class SourceEffect(Change):
    """Effect of a source on a set; a positive `change` without it means that it helps."""

    source: str = key("The source, as the set lists it")
    texts: list[int] = key("Its samples in each draw", "samples")
    tokens: list[int] = key("Its tokens in each draw", "tokens")
    verdict: Literal["helps", "hurts", "no difference", "too few texts"] = key("What it does")
    words: str = key("The same in words, to follow the source's name")


class DrawnOutputs(Part):
    """Outputs that were quantized with draws of calibration sets, and measured on the same held-out texts."""

    model: str = key("The source, as it was given")
    evaluated_on: HeldOutSet = key("The held-out set")
    solved_layers: int = key("Layers whose experts were quantized; the others keep the source's", "layers")
    layers: int = key("Layers of the model", "layers")
    draws: int = key("Draws of each set", "draws")
    tokens: int | None = key("Tokens asked for in each draw; None for whole sets", "tokens")
    texts: list[ScoredText] = key("The held-out texts; figures are over the short ones where there are both")
    notes: list[str] = key("What a reader should know")


class SetComparison(DrawnOutputs):
    """Output of `quantize compare --json`."""

    looks: int = key("Looks at the result, at most; another is taken while a pair is undecided")
    error: float = key("Probability that an interval misses the truth: 0.05 / looks", "share")
    sets: list[SetFigures] = key("In the order of the command line")
    pairs: list[SetPair] = key("Each two sets; the first is the one that was given before the other")


class SourceEffects(DrawnOutputs):
    """Output of `quantize calibration why --json`: each source left out of the same draws; intervals are of 95 %."""

    set: SetFigures = key("The whole set")
    sources: list[SourceEffect] = key("By change, largest first")
