"""KL of a mixture of schemes within a budget against the best uniform one of that size, over draws of the set.

    python benchmarks/budgets.py tiny-minimax-m2-fp8-int4 --bits-per-weight 2.5 2.75 3 3.5 --draws 5 --tokens 15000

Each draw is measured, chosen and quantized by itself, and so is the uniform scheme that its measurement prefers of
those that fit. The gain is a mean of ratios, each of two outputs that were calibrated with the same samples.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bits import draw
from methods import calibration_data, held_out, options, quantized, recipe_job

from quantizers.budget.choice import describe_choice
from quantizers.budget.measure import measure_schemes
from quantizers.calibration.samples import token_tensors
from quantizers.device.devices import choose_device
from quantizers.formats.packed_integers import Integers
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import Job
from quantizers.system.formatting import text_table
from quantizers.walk.context import Context

Rows = list[dict[str, Any]]


def compare_budgets(jobs: Sequence[Job], draws: int, tokens: int, device: torch.device) -> Rows:
    """A row for each budget's job and each set of samples (0 the whole set, then the draws)."""
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        whole = calibration_data(jobs[0])
        for number in range(draws + 1):
            data = draw(whole, tokens, number) if number else whole
            made = dict[str, int]()  # the outputs of this draw, by their layers' schemes
            for job in jobs:
                assert job.allocation is not None
                work = Path(folder) / f"measured-{len(rows)}"
                work.mkdir()
                context = Context(work, device, Placement(Residents(job.facts.num_experts, 1, 0)))
                measurements = measure_schemes(job, token_tensors(data, job.facts.vocab_size), context)
                assert measurements is not None
                choice = describe_choice(job.allocation, measurements)
                layers = [Integers(row.bits, row.group_size) for row in choice.layers]
                uniform = next(scheme for scheme in job.allocation.candidates if str(scheme) == choice.uniform)
                row = {"budget": choice.limit, "draw": number, "predicted": choice.gain}
                for name, schemes in (("mixture", layers), ("uniform", [uniform] * len(layers))):
                    key = ", ".join(map(str, schemes))
                    if key not in made:
                        made[key] = len(outputs)
                        by_layer = dict(zip(job.allocation.layers, schemes, strict=True))
                        planned = [by_layer.get(layer, schemes[0]) for layer in range(job.plan.layers)]
                        variant = replace(job, plan=job.plan.with_schemes(planned))
                        outputs.append(quantized(variant, data, Path(folder) / str(len(outputs)), device))
                    row |= {name: key, f"{name}_output": made[key]}
                rows.append(row)
        results = held_out(jobs[0], outputs, Path(folder) / "eval", device)
    for row in rows:
        row |= {f"{name}_kl": results[row.pop(f"{name}_output")]["kl"]["mean"] for name in ("mixture", "uniform")}
    return rows


def budgets_table(rows: Rows) -> str:
    """KL of mixture and uniform scheme with the whole set, and what the mixture gains with all sets."""
    lines = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of_budget = [row for row in rows if row["budget"] == budget]
        gains = [1 - row["mixture_kl"] / row["uniform_kl"] for row in of_budget]
        first = of_budget[0]
        cells = (
            f"{budget:g}",
            f"{first['mixture_kl']:.5f}",
            f"{first['uniform_kl']:.5f}",
            first["uniform"].split(",")[0],
        )
        of_all = f"{min(gains):.1%} to {max(gains):.1%}"
        lines.append((*cells, f"{statistics.mean(gains):.1%}", of_all, f"{first['predicted']:.0%}"))
    heads = ("bits per weight", "KL mixture", "KL uniform", "uniform", "gain", "of each set", "predicted")
    return text_table(heads, lines)


def main() -> None:
    """Compare mixtures with uniform schemes of the same size on a recipe's model."""
    parser = options(__doc__)
    parser.set_defaults(tokens=15000)
    parser.add_argument("--bits-per-weight", type=float, nargs="+", default=[2.5, 2.75, 3.0, 3.5])
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    jobs = [
        recipe_job(given.recipe, f"experts.bits_per_weight={budget}", "experts.bits=null", "experts.group_size=null")
        for budget in given.bits_per_weight
    ]
    rows = compare_budgets(jobs, given.draws, given.tokens, choose_device(given.device))
    print(json.dumps(rows, indent=1) if given.json else budgets_table(rows))


if __name__ == "__main__":
    main()
