"""KL of a mixture of schemes within a budget against the best uniform one of that size, over draws of the set.

    python benchmarks/budgets.py tiny-minimax-m2-fp8-int4 --bits-per-weight 2.5 2.75 3 3.5 --draws 5 --tokens 15000

Each draw is measured, chosen and quantized by itself, and so is the uniform scheme that its measurement prefers of
those that fit. The gain is a mean of ratios, each of two outputs that were calibrated with the same samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bits import draw
from measured_rows import Table, budget_settings, recipe_job, row_options
from methods import calibration_data, quantized

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


def compare_budgets(jobs: Sequence[Job], given: argparse.Namespace) -> Rows:
    """A row for each budget's job and each set of samples (0 the whole set, then the draws)."""
    rows: Rows = []
    device, whole = choose_device(given.device), calibration_data(jobs[0])
    table = Table(jobs[0], given, "budgets")
    with tempfile.TemporaryDirectory() as folder:
        for number in range(0 if given.whole else 1, given.draws + 1):
            data = draw(whole, given.tokens, number) if number else whole
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
                    row[name] = ", ".join(map(str, schemes))
                    by_layer = dict(zip(job.allocation.layers, schemes, strict=True))
                    planned = [by_layer.get(layer, schemes[0]) for layer in range(job.plan.layers)]
                    variant = replace(job, plan=job.plan.with_schemes(planned))
                    key = f"draw {number}: {row[name]}"  # the same for another budget is made once
                    (measured,) = table.measure({key: partial(quantized, variant, data, device=device)})
                    row[f"{name}_kl"] = measured["kl"]
                rows.append(row)
    return rows


def budgets_table(rows: Rows) -> str:
    """KL of mixture and uniform scheme with the first set, and what the mixture gains with all sets."""
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
    parser = row_options(__doc__, chosen=False)
    parser.set_defaults(tokens=15000)
    parser.add_argument("--bits-per-weight", type=float, nargs="+", default=[2.5, 2.75, 3.0, 3.5])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--no-whole", dest="whole", action="store_false", help="leave the whole set out")
    given = parser.parse_args()
    job = recipe_job(given.recipe)
    jobs = [recipe_job(given.recipe, *budget_settings(job, budget)) for budget in given.bits_per_weight]
    rows = compare_budgets(jobs, given)
    print(json.dumps(rows, indent=1) if given.json else budgets_table(rows))


if __name__ == "__main__":
    main()
