"""The schema of what commands print with --json, with parts of that of report.json."""

from __future__ import annotations

from typing import Any, Literal

from quantizers.eval.report.fidelity import Fidelity, ServeCheckReport
from quantizers.eval.report.keys import Number, Part, key, maybe
from quantizers.eval.report.schema import AuditFigures, Coverage, Drawn, Engines, Gate, RunReport, StitchReport
from quantizers.sets.schema import SetComparison, SourceEffects


class EvaluatedCandidate(Fidelity):
    """A candidate of `quantize eval`."""

    model: str = key("As it was given")


class Difference(Part):
    """Mean KL of a candidate minus that of the first, over some texts."""

    texts: int = key("Texts", "texts")
    tokens: int = key("Scored tokens", "tokens")
    first: Number = key("Mean KL of the first candidate", "nats")
    other: Number = key("Mean KL of this candidate", "nats")
    difference: Number = key("Other minus first; negative is closer to the source", "nats")
    interval: list[Number] | None = key("95 % bootstrap-t interval; None with too few texts", "nats")


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
    """What `quantize eval --json` prints."""

    source: str = key("As it was given")
    candidates: list[EvaluatedCandidate] = key("In the order of the command line")
    notes: list[str] = key("What a reader should know")
    paired: list[PairedCandidate] | None = maybe("Each candidate but the first; absent with a single one")


class VerifyReport(AuditFigures):
    """What `quantize verify --json` prints."""

    notes: list[str] = key("What is not a fault but worth knowing")
    consumers: Engines | None = maybe("Serving engines; absent if the folder could not be opened")
    vllm: dict[str, Any] | None = maybe("vLLM's own answers; with --with-vllm only")


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
    """What `quantize coverage --json` prints of one set."""

    model: str = key("As it was given")
    set: str = key("Name of the set")
    tokens: dict[str, int] = key("Tokens by category", "tokens")
    tied_choices: int = key("Choices that were a tie", "choices")
    worst: list[WorstExpert] = key("The experts with the fewest tokens")
    counts: dict[str, list[list[int]]] = key("By category: routed tokens by layer and expert", "tokens")
    gates: list[Gate] = key("The gates on coverage")
    drawn: Drawn | None = maybe("What was drawn; absent where the whole set is used")
    saliency: Saliency | None = maybe("What the experts contribute; with --saliency only")


class ImatrixReport(Part):
    """What `quantize imatrix --json` prints."""

    output: str = key("The file")
    model: str = key("As it was given")
    set: str = key("Name of the set")
    tokens: int = key("Tokens of the set", "tokens")
    of: Literal["both", "routed", "all"] = key("Which of them go into the sums of an expert's matrices")
    architecture: str = key("llama.cpp's name of the model's architecture")
    matrices: int = key("Matrices in the file", "matrices")
    without_tokens: dict[str, list[int]] = key("By matrix: experts without a token")
    left_out: dict[str, int] = key("By matrix: rows that are not finite and left out", "rows")
    unnamed: list[str] = key("Published names of matrices that are left out: without a name in llama.cpp, or unused")
    not_computed: list[int] = key("Layers that predict further tokens, which have no data")
    drawn: Drawn | None = maybe("What was drawn; absent where the whole set is used")


class DoctorCheck(Part):
    """One thing that `quantize doctor` looked at."""

    what: str = key("Its name")
    found: str = key("What was found")
    state: Literal["ok", "note", "stops"] = key("Whether it would end a run (`stops`), or is worth knowing (`note`)")
    remedy: str | None = maybe("What to do; absent if the state is ok")


class DoctorReport(Part):
    """What `quantize doctor --json` prints."""

    recipe: str | None = key("The recipe as it was given; None without one")
    output: str = key("The folder that a run would write")
    passed: bool = key("Whether nothing would stop the recipe, or without one the program")
    checks: list[DoctorCheck] = key("All checks: of the machine, the Hub, servers, and the recipe")


PRINTED: dict[str, type[Part]] = {  # by the command that prints it; run and stitch print report.json
    "eval": EvalReport,
    "verify": VerifyReport,
    "doctor": DoctorReport,
    "coverage": CoverageReport,
    "imatrix": ImatrixReport,
    "serve-check": ServeCheckReport,
    "compare": SetComparison,
    "calibration why": SourceEffects,
}
JSON_REPORTS: tuple[type[Part], ...] = (RunReport, StitchReport, *PRINTED.values())
