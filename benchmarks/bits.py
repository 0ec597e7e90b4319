"""KL at each number of bits, with scales of both signs and with positive ones, over draws of the calibration set.

    python benchmarks/bits.py tiny-minimax-m2-fp8-int4 --bits 2 3 4 8 --draws 5 --tokens 15000
    python benchmarks/bits.py mine.yaml --signs both --draws 1 --no-whole --tokens 4096     # an output for each scheme

Each cell is a mean over the held-out tokens: of an output calibrated with the whole set, and of as many outputs as
there are draws, each calibrated with so many tokens of samples in an order of its own. The same draws serve all rows.
Of every draw both outputs are measured, so the change between them is a mean of paired ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from measured_rows import Row, Table, recipe_job, row_options
from methods import Method, calibration_data, quantized, variant

from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import choose_device
from quantizers.formats.packed_integers import Integers
from quantizers.planning.job import Job
from quantizers.system.formatting import text_table

SIGNS = ("positive", "both")
Rows = list[Row]


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


def compare_bits(job: Job, schemes: Sequence[Integers], given: argparse.Namespace) -> Rows:
    """A row for each scheme, sign and set of samples (0 the whole set, then the draws), as far as they are wanted."""
    whole, device = calibration_data(job), choose_device(given.device)
    numbers = range(given.draws + 1) if given.whole else range(1, given.draws + 1)
    rows = {
        f"{scheme}, {sign}, {f'draw {number}' if number else 'whole'}": (scheme, sign, number)
        for scheme in schemes
        for sign in given.signs
        for number in numbers
    }

    def make(scheme: Integers, sign: str, number: int, place: Path) -> Checkpoint:
        changes = {"bits": scheme.bits, "group_size": scheme.group_size, "scales_sign": sign}
        changed = variant(job, Method("", job.recipe.experts.model_copy(update=changes)))
        return quantized(changed, draw(whole, given.tokens, number) if number else whole, place, device)

    def which(name: str, _: Path) -> Row:
        scheme, sign, number = rows[name]
        return {"scheme": str(scheme), "sign": sign, "draw": number}

    return Table(job, given, "bits").measure({name: partial(make, *row) for name, row in rows.items()}, which)


def bits_table(rows: Rows) -> str:
    """KL of each sign with the first set, and the changes of mean and median from positive scales to both signs.

    The changes are means over the sets of which both are measured.
    """
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        by_sign = [{row["draw"]: row for row in rows if (row["scheme"], row["sign"]) == (scheme, s)} for s in SIGNS]
        first = [next(iter(of_sign.values()), None) for of_sign in by_sign]
        cells = [scheme, *(f"{row['kl']:.5f}" if row else "" for row in first)]
        positive, both = by_sign
        shared = [draw for draw in both if draw in positive]
        for figure in ("kl", "median"):
            ratios = [both[draw][figure] / positive[draw][figure] - 1 for draw in shared]
            of_each = f"{min(ratios):+.1%} to {max(ratios):+.1%}" if ratios else ""
            cells += [f"{statistics.mean(ratios):+.1%}" if ratios else "", of_each]
        last = first[1] or first[0]
        assert last is not None
        lines.append((*cells, f"{last['top1']:.1%}"))
    heads = ("scheme", "KL positive", "KL both", "mean KL", "of each set", "median KL", "of each set", "top-1")
    return text_table(heads, lines)


def main() -> None:
    """Compare both kinds of scales at each number of bits on a recipe's model."""
    parser = row_options(__doc__)
    parser.set_defaults(tokens=15000)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[32])
    parser.add_argument("--signs", nargs="+", choices=SIGNS, default=SIGNS)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--no-whole", dest="whole", action="store_false", help="leave the whole set out")
    given = parser.parse_args()
    schemes = [Integers(bits, size) for bits in given.bits for size in given.group_sizes]
    rows = compare_bits(recipe_job(given.recipe), schemes, given)
    print(json.dumps(rows, indent=1) if given.json else bits_table(rows))


if __name__ == "__main__":
    main()
