"""What each part of the method gains: KL of ours without it beside ours, over draws of the calibration set.

    python benchmarks/parts.py tiny-minimax-m2-fp8-int4 --draws 5 --tokens 15000
    python benchmarks/parts.py tiny-minimax-m2-fp8-int4 --flat      # without the model's outlier channels

The same draws serve all rows, so a change is a mean of paired ratios. What no recipe can switch off, the sweeps and the
correction of w2, is replaced in the solver while a row is made.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bits import draw
from gguf_types import plain_tensors, written
from measured_rows import Row, Table, recipe_job, row_options
from methods import Method, calibration_data, quantized, variant

from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import choose_device
from quantizers.planning.job import Job, prepare
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import solver
from quantizers.system.formatting import text_table

DEFAULT, PLAIN = "ours", "AWQ + GPTQ alone"


@dataclass(frozen=True)
class Ours:
    """A row: settings of the experts, and names of the solver with what takes their place."""

    experts: Experts
    replaced: dict[str, Any] = field(default_factory=dict)

    def output(self, job: Job, data: CalibrationData, place: Path, device: torch.device) -> Checkpoint:
        """The output of a job with these settings, in a new folder."""
        with patch.multiple(solver, **self.replaced) if self.replaced else nullcontext():
            return quantized(variant(job, Method("", self.experts)), data, place, device)


def rows_of(experts: Experts, *, folds: bool = True) -> dict[str, Ours]:
    """The whole method, plain ones, and the method without one part each; without the fold only where one is made."""

    def changed(**changes: Any) -> Experts:
        return experts.model_copy(update=changes)

    no_sweeps, no_correction = {"SWEEPS": 0}, {"corrected": lambda down, *_: down}
    positive: dict[str, Any] = {} if experts.format == "nvfp4" else {"scales_sign": "positive"}
    plain: dict[str, Any] = {"scales": "minmax", "routed_weight": 0.0} | positive
    return {
        DEFAULT: Ours(experts),
        "without AWQ": Ours(changed(awq=False)),
        **({"without the fold": Ours(changed(awq=Awq(fold=False)))} if folds else {}),
        "without GPTQ, sweeps and correction": Ours(changed(rounding="nearest")),
        "without sweeps": Ours(experts, no_sweeps),
        "without correction of w2": Ours(experts, no_correction),
        "with min-max scales": Ours(changed(scales="minmax")),
        "with positive scales": Ours(changed(**positive)),
        "with all tokens alike (a = 0)": Ours(changed(routed_weight=0.0)),
        PLAIN: Ours(changed(**plain), no_sweeps | no_correction),
        "to nearest": Ours(changed(awq=False, rounding="nearest", **plain)),
    }


def compare_parts(job: Job, given: argparse.Namespace) -> list[Row]:
    """A row for each method and draw, as far as they are wanted."""
    whole, device = calibration_data(job), choose_device(given.device)
    methods = rows_of(job.recipe.experts, folds=job.plan.folds)
    rows = {f"{name}, draw {seed}": (name, seed) for seed in range(1, given.draws + 1) for name in methods}

    def make(name: str, seed: int, place: Path) -> Checkpoint:
        return methods[name].output(job, draw(whole, given.tokens, seed), place, device)

    def which(name: str, _: Path) -> Row:
        method, seed = rows[name]
        return {"method": method, "draw": seed}

    label = "parts, flat" if given.flat else "parts"
    return Table(job, given, label).measure({name: partial(make, *row) for name, row in rows.items()}, which)


def parts_table(rows: Sequence[Row]) -> str:
    """KL, a mean over the draws, and the change to ours of mean and median: their means, and from least to most.

    Without a row of ours with the same draw there is no change.
    """
    cells, base = [], {row["draw"]: row for row in rows if row["method"] == DEFAULT}
    for name in dict.fromkeys(row["method"] for row in rows):
        rows_of_method, cell = [row for row in rows if row["method"] == name], [name]
        for figure in ("kl", "median"):
            paired = [row for row in rows_of_method if row["draw"] in base and name != DEFAULT]
            ratios = [row[figure] / base[row["draw"]][figure] - 1 for row in paired]
            spread = f"{statistics.mean(ratios):+.1%} ({min(ratios):+.1%} to {max(ratios):+.1%})" if ratios else ""
            cell += [f"{statistics.mean(row[figure] for row in rows_of_method):.5f}", spread]
        cells.append(cell)
    return text_table(("experts", "mean KL", "change", "median KL", "change"), cells)


def main() -> None:
    """Compare all rows on a recipe's model."""
    parser = row_options(__doc__)
    parser.set_defaults(tokens=15000)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--flat", action="store_true", help="measure the model without its outlier channels")
    given = parser.parse_args()
    job = recipe_job(given.recipe)
    with tempfile.TemporaryDirectory() as folder:
        if given.flat:
            flat = written(plain_tensors(job, flat=True), job.opened, Path(folder) / "flat")
            job = prepare(str(job.path), source_folder=flat)
        rows = compare_parts(job, given)
    print(json.dumps(rows, indent=1) if given.json else parts_table(rows))


if __name__ == "__main__":
    main()
