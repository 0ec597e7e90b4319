"""KL at each number of bits, with scales of both signs and with positive ones, over draws of the calibration set.

    python benchmarks/bits.py tiny-minimax-m2-fp8-int4 --bits 2 3 4 8 --draws 5 --tokens 15000

Each cell is a mean over the held-out tokens: of an output calibrated with the whole set, and of as many outputs as
there are draws, each calibrated with so many tokens of samples in an order of its own. The same draws serve all rows.
Of every draw both outputs are measured, so the change between them is a mean of paired ratios.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from methods import Method, calibration_data, held_out, options, quantized, recipe_job, variant

from quantizers.calibration.samples import CalibrationData
from quantizers.device.devices import choose_device
from quantizers.formats.packed_integers import Integers
from quantizers.planning.job import Job
from quantizers.system.formatting import text_table

SIGNS = ("positive", "both")
Rows = list[dict[str, Any]]


def draw(data: CalibrationData, tokens: int, seed: int) -> CalibrationData:
    """The first samples of the set in an order drawn by the seed, until they have `tokens` tokens."""
    order = torch.randperm(len(data.samples), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen, total = [], 0
    for number in order:
        if total >= tokens:
            break
        chosen.append(number)
        total += len(data.samples[number].tokens)
    return replace(data, samples=[data.samples[number] for number in sorted(chosen)])


def compare_bits(job: Job, schemes: Sequence[Integers], draws: int, tokens: int, device: torch.device) -> Rows:
    """A row for each scheme, sign and set of samples (0 the whole set, then the draws), with mean and median KL."""
    whole = calibration_data(job)
    sets = [whole, *(draw(whole, tokens, seed) for seed in range(1, draws + 1))]
    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = []
        for scheme in schemes:
            for sign in SIGNS:
                changes = {"bits": scheme.bits, "group_size": scheme.group_size, "scales_sign": sign}
                experts = job.recipe.experts.model_copy(update=changes)
                changed = variant(job, Method(str(scheme), experts))
                for number, data in enumerate(sets):
                    outputs.append(quantized(changed, data, Path(folder) / str(len(outputs)), device))
                    rows.append({"scheme": str(scheme), "sign": sign, "draw": number})
        results = held_out(job, outputs, Path(folder) / "eval", device)
    for row, result in zip(rows, results, strict=True):
        row |= {"mean": result["kl"]["mean"], "median": result["kl"]["median"], "top1": result["top1"]}
    return rows


def _pairs(rows: Rows) -> Iterator[tuple[str, list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        positive, both = ([row for row in of_scheme if row["sign"] == sign] for sign in SIGNS)
        yield scheme, positive, both


def bits_table(rows: Rows) -> str:
    """KL with the whole set, with positive scales and with both signs, and the changes of all sets' mean and median."""
    lines = []
    for scheme, positive, both in _pairs(rows):
        cells = [scheme, f"{positive[0]['mean']:.5f}", f"{both[0]['mean']:.5f}"]
        for figure in ("mean", "median"):
            ratios = [row[figure] / base[figure] - 1 for row, base in zip(both, positive, strict=True)]
            cells += [f"{statistics.mean(ratios):+.1%}", f"{min(ratios):+.1%} to {max(ratios):+.1%}"]
        lines.append(tuple(cells))
    heads = ("scheme", "KL positive", "KL both", "mean KL", "of each set", "median KL", "of each set")
    return text_table(heads, lines)


def main() -> None:
    """Compare both kinds of scales at each number of bits on a recipe's model."""
    parser = options(__doc__)
    parser.set_defaults(tokens=15000)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    schemes = [Integers(bits, given.group_size) for bits in given.bits]
    rows = compare_bits(recipe_job(given.recipe), schemes, given.draws, given.tokens, choose_device(given.device))
    print(json.dumps(rows, indent=1) if given.json else bits_table(rows))


if __name__ == "__main__":
    main()
