"""From a budget to each layer's scheme: measure, choose, record the choice, and report it with its reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quantizers.architectures.matrices import MATRICES
from quantizers.eval.report.schema import ChosenLayer, PlannedSchemes, Schemes
from quantizers.formats.packed_integers import Integers
from quantizers.output import journal
from quantizers.output.journal import finished_report, refuse_changes
from quantizers.planning.allocation import Allocation
from quantizers.recipe.schema import counted
from quantizers.system.errors import InputError
from quantizers.walk.context import Context

if TYPE_CHECKING:
    import torch

    from quantizers.planning.job import Job

    from .measure import LayerMeasurement

CHOICE = "choice.json"
RESAMPLED = 1000  # times, for the interval of a gain


def choose_schemes(job: Job, tokens: Sequence[torch.Tensor] | None, context: Context, output: Path) -> Job:
    """The job with the chosen schemes, measured first if need be; OutputError if an unfinished run chose others."""
    from .measure import measure_schemes

    assert job.allocation is not None
    schemes, measurements = None, measure_schemes(job, tokens, context)
    if measurements is not None:
        schemes = job.allocation.schemes(choose(job.allocation, measurements).picked)
        refuse_changes(context.work, {"schemes": [str(scheme) for scheme in schemes]}, output, CHOICE)
    return replace(job, plan=job.plan.with_schemes(context.dist.broadcast_object(schemes)))


@dataclass(frozen=True)
class Choice:
    """A candidate for each layer, and what a mixture gains over the best candidate that all layers could have."""

    picked: list[int]  # the mixture, or the same for all where nothing is gained
    uniform: int  # the candidate with the least predicted KL of those that fit when all layers use it
    gain: float  # 1 - predicted KL of the mixture / that with `uniform`
    interval: tuple[float, float]  # 95 % of it, over samples of the measured experts


def choose(allocation: Allocation, measurements: Sequence[LayerMeasurement]) -> Choice:
    """The choice by the measurements of all layers."""
    table = np.array([[layer.loss[str(scheme)] for scheme in allocation.candidates] for layer in measurements])
    mixture = allocation.choose([layer.loss for layer in measurements])
    uniform = min(allocation.uniforms, key=lambda number: (table[:, number].sum(), number))
    whole = float(table[:, uniform].sum())
    if whole <= 0 or mixture == allocation.uniform(uniform):
        return Choice(allocation.uniform(uniform), uniform, 0.0, (0.0, 0.0))
    sums, generator = np.zeros((2, RESAMPLED)), np.random.default_rng(0)
    for measured, number in zip(measurements, mixture, strict=True):
        names = [str(allocation.candidates[n]) for n in (number, uniform)]
        errors = np.array([measured.by_expert[name] for name in names])
        drawn = generator.integers(errors.shape[1], size=(RESAMPLED, errors.shape[1]))
        error = measured.error[names[1]]
        grown = measured.loss[names[1]] / error if error else 0.0
        sums += errors[:, drawn].sum(-1) * grown
    gain = 1 - sum(table[layer, number] for layer, number in enumerate(mixture)) / whole
    low, high = (float(limit) for limit in np.quantile(1 - sums[0] / np.maximum(sums[1], 1e-300), (0.025, 0.975)))
    return Choice(mixture if low > 0 else allocation.uniform(uniform), uniform, float(gain), (low, high))


def describe_choice(allocation: Allocation, measurements: Sequence[LayerMeasurement]) -> Schemes:
    """For report.json and `quantize plan`: candidates, bounds, and each layer's scheme with its measurements."""
    choice = choose(allocation, measurements)
    picked = choice.picked
    schemes, coarsest = [allocation.candidates[index] for index in picked], str(allocation.candidates[0])
    layers = [
        ChosenLayer(
            layer=measured.layer,
            scheme=str(scheme),
            bits=scheme.bits,
            group_size=scheme.group_size,
            bytes=row[index],
            kl=measured.kl,
            disturbance=measured.disturbance,
            loss={**measured.loss},
            error={**measured.error},
            by_matrix={scheme: {**shares} for scheme, shares in measured.by_matrix.items()},
            experts=measured.experts,
        )
        for scheme, index, measured, row in zip(schemes, picked, measurements, allocation.shard_bytes, strict=True)
    ]
    return Schemes(
        **allocation.as_dict(),
        chosen=counted(schemes),
        output_bytes=allocation.output_bytes(picked),
        bits_per_weight=allocation.bits_per_weight(picked),
        predicted_kl=sum(layer.loss[str(scheme)] for layer, scheme in zip(measurements, schemes, strict=True)),
        uniform=str(allocation.candidates[choice.uniform]),
        gain=choice.gain,
        gain_interval=list(choice.interval),
        coarsest=coarsest,
        by_matrix=dict(matrix_shares(measurements, coarsest)),
        layers=layers,
    )


def matrix_shares(measurements: Sequence[LayerMeasurement], scheme: str) -> dict[str, float]:
    """Each matrix's share of the loss under one scheme when it alone is rounded, in all layers."""
    totals = {matrix: 0.0 for matrix in MATRICES if all(matrix in m.by_matrix[scheme] for m in measurements)}
    for layer in measurements:
        error = layer.error[scheme]
        for matrix in totals:
            totals[matrix] += layer.loss[scheme] * layer.by_matrix[scheme][matrix] / error if error > 0 else 0.0
    whole = sum(totals.values())
    return {matrix: value / whole if whole > 0 else 0.0 for matrix, value in totals.items()}


def apply_choice(job: Job, output: Path | None) -> tuple[Job, Schemes | PlannedSchemes | None]:
    """For `quantize plan`: a job with the schemes that a run in `output` has chosen, and their description.

    The description is None for a recipe without a budget; without `output` it has the candidates and bounds.

    Raises:
        InputError: the folder holds no choice of this recipe.
    """
    if job.allocation is None:
        if output is not None:
            raise InputError(job.path, f"has no budget, so nothing is chosen in {output}", "leave --output out")
        return job, None
    if output is None:
        return job, PlannedSchemes(**job.allocation.as_dict(), planned=str(job.plan.schemes[0]))
    choice = read_choice(job, output)
    if choice is None:
        raise InputError(output, "no run of this recipe has measured its layers there", "leave --output out")
    chosen = [job.allocation.candidates.index(Integers(row.bits, row.group_size)) for row in choice.layers]
    return replace(job, plan=job.plan.with_schemes(job.allocation.schemes(chosen))), choice


def read_choice(job: Job, output: Path) -> Schemes | None:
    """The choice of a finished or unfinished run in `output`; None if it has made none, or ran another recipe."""
    from quantizers.recipe.portable import is_made_by

    from .measure import read_measurements

    assert job.allocation is not None
    if (report := finished_report(output)) is not None:
        schemes = report.get("schemes") if is_made_by(report, job.recipe, job.path) else None
        return schemes and Schemes.model_validate(schemes)
    work = journal.work_folder(output)
    measurements = read_measurements(work, job.facts.moe_layers)
    try:
        same = json.loads((work / "run.json").read_text())["experts"] == job.recipe.settings()["experts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return describe_choice(job.allocation, measurements) if measurements and same else None
