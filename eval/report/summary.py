"""Text about a run: its figures in a few sentences, its bit budget with candidates, choice and measurements."""

from __future__ import annotations

import math

from quantizers.eval.fidelity.figures import Fidelity
from quantizers.formats.format import ExpertFormat, format_of
from quantizers.formats.lossless import TARGETS, Target
from quantizers.system.formatting import number, size, size_from, text_table

from .schema import (
    Budget,
    ChosenLayer,
    ConversionReport,
    Planned,
    PlannedByRecipe,
    Report,
    RunReport,
    Schemes,
    StitchReport,
)

NAMES = {"gate": "w1 (gate)", "up": "w3 (up)", "down": "w2 (down)"}
NAMELESS = "PATH_OR_ID"  # in the commands of a model card, until a repository is known


def summary(report: Report) -> list[str]:
    """Sentences on the gates, and on the KL against its limit."""
    gates = report.gates
    words = f"All {len(gates)} gates passed." if len(gates) > 1 else "The only gate passed."
    if failed := [gate.name for gate in gates if not gate.passed]:
        words = f"{len(failed)} of {len(gates)} gates failed: {', '.join(failed)}."
    if isinstance(report, ConversionReport):
        return [words, conversion_line(report)]
    if not isinstance(report, Fidelity):
        return [words]
    within = "its recipe sets no limit"
    for gate in gates:
        if gate.name == "kl":
            side = "within" if gate.passed else "above"
            within = f"{side} the limit of {gate.limit:.4g} that its recipe sets"
    return [
        words,
        f"KL {number(report.kl.mean, '.4f')} nats per token on {report.evaluated_on.name}: {within}. "
        f"Perplexity {number(report.perplexity.increase, '+.2%')}, the same most likely token at "
        f"{number(report.top1, '.1%')} of the positions.",
    ]


# Bit budget --------------------------------------------------------------------------------------------------------


def limit_text(budget: Budget) -> str:
    """The recipe's budget in words."""
    if budget.unit == "bytes":
        return f"{size(int(budget.limit))} of shards"
    return f"{budget.limit:.6g} bits per expert weight"


def candidate_lines(budget: Budget) -> list[str]:
    """The candidate schemes, and the bounds of possible budgets."""
    rows = []
    for row in budget.candidates:
        least, most = map(size, row.layer_bytes)
        layer = least if least == most else f"{least} to {most}"
        gpus = " ".join(map(str, row.tensor_parallel))
        rows.append((row.scheme, f"{row.bits_per_weight:g}", layer, size(row.output_bytes), gpus))
    smallest, largest = budget.candidates[0], budget.candidates[-1]
    bounds = (
        f"{size_from(smallest.output_bytes)} to {size_from(largest.output_bytes)}"
        if budget.unit == "bytes"
        else f"{smallest.bits_per_weight:g} to {largest.bits_per_weight:g} bits per weight"
    )
    above = "; above all of them, so every layer gets the best" if budget.above_the_largest else ""
    return [
        f"budget {limit_text(budget)}; possible are {bounds}{above}",
        text_table(("for each layer", "bits per weight", "a layer", "shards, if everywhere", "tensor parallel"), rows),
    ]


def choice_lines(schemes: Schemes) -> list[str]:
    """The choice in a few lines."""
    shares, coarsest = schemes.by_matrix, schemes.coarsest
    kl = [_loss(row, coarsest) for row in schemes.layers]
    numbers = [row.layer for row in schemes.layers]
    worst, least = kl.index(max(kl)), kl.index(min(kl))
    parts = ", ".join(f"{NAMES[matrix]} {share:.0%}" for matrix, share in sorted(shares.items(), key=lambda p: -p[1]))
    above = "; the budget is above the largest possible" if schemes.above_the_largest else ""
    return [
        f"{schemes.chosen}: {size(schemes.output_bytes)} of shards, {schemes.bits_per_weight:.4g} bits per "
        f"weight, within {limit_text(schemes)}{above}",
        _gain_line(schemes),
        f"predicted KL of a layer as {coarsest}: most {kl[worst]:.2g} (layer {numbers[worst]}), least {kl[least]:.2g} "
        f"(layer {numbers[least]}), first {kl[0]:.2g}; of it {parts}",
    ]


def _loss(row: ChosenLayer, scheme: str) -> float:
    loss = row.loss[scheme]
    return math.nan if loss is None else loss


def _gain_line(schemes: Schemes) -> str:
    gain = schemes.gain
    low, high = schemes.gain_interval
    uniform = f"{schemes.uniform} in every layer"
    if not gain:
        return f"no mixture within the budget is predicted to be closer than {uniform}"
    interval = f"{gain:.0%} less KL predicted than with {uniform} ({low:.0%} to {high:.0%})"
    return f"a mixture: {interval}" + ("" if low > 0 else "; no certain gain, so all layers have the same")


def layer_rows(schemes: Schemes) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of a table: each layer's scheme with its measurements."""
    coarsest = schemes.coarsest
    names = [matrix for matrix in NAMES if matrix in schemes.by_matrix]
    header = ("layer", "scheme", "bytes", "predicted KL", f"as {coarsest}", *(f"error of {m}" for m in names))
    rows = []
    for row in schemes.layers:
        losses = (f"{_loss(row, scheme):.5f}" for scheme in (row.scheme, coarsest))
        errors = (f"{(row.by_matrix[coarsest][matrix] or 0.0) ** 0.5:.2%}" for matrix in names)
        rows.append((str(row.layer), row.scheme, f"{row.bytes:,}", *losses, *errors))
    return header, rows


def under_routed_line(report: Report) -> str:
    """Line on experts with too few routed tokens for the recipe's full `routed_weight`; empty if none, or if they
    were not counted, as in a stitch.
    """
    if not isinstance(report, RunReport):
        return ""
    rows = [layer.leaning for layer in report.layers if layer.leaning]
    few = sum(row.experts for row in rows)
    if not few:
        return ""
    experts, weight = report.plan.experts_per_layer, report.settings.recipe["experts"]["routed_weight"]
    smallest = min(row.smallest_share for row in rows)
    return (
        f"{few:,} of {experts * len(rows):,} experts got fewer than {rows[0].full_share_at:,} routed tokens "
        f"and rely on all tokens in part (smallest share {smallest:.2f} of {weight:g})"
    )


def scheme_lines(report: Report) -> list[str]:
    """`choice_lines` of a report; nothing if the recipe has no budget."""
    return choice_lines(report.schemes) if isinstance(report, RunReport) and report.schemes else []


def conversion_line(report: ConversionReport) -> str:
    """The sentence with which a conversion proves that its numbers are the source's."""
    made = report.conversion
    return (
        f"{made.matrices:,} matrices in {' and '.join(made.before)} were converted to {TARGETS[made.to].short}: all "
        f"{made.values:,} values are equal to the source's."
    )


def converted_to(report: Planned) -> Target | None:
    """The format that the experts of a report's output were converted to; None if they were quantized."""
    experts = report.settings.recipe["experts"] if isinstance(report, PlannedByRecipe) else {}
    return TARGETS.get(experts.get("convert", ""))


def expert_schemes(report: Planned) -> list[ExpertFormat]:
    """The experts' schemes, smallest first; several if layers differ, none before a run has chosen within a budget,
    and for experts that are converted.
    """
    if isinstance(report, StitchReport):
        return sorted(map(format_of, report.experts.schemes))
    if isinstance(report, RunReport) and report.schemes:
        return sorted({format_of(layer.as_dict()) for layer in report.schemes.layers})
    assert isinstance(report, PlannedByRecipe)
    experts = report.settings.recipe["experts"]
    unknown = not {"budget", "bits_per_weight", "convert"}.isdisjoint(experts)
    return [] if unknown else [format_of(experts)]


def repository(report: Planned) -> str:
    """The name of the output in commands: the repository that it was last published in, or else NAMELESS."""
    return report.published.repo if report.published else NAMELESS
