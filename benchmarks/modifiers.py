"""KL of experts by each of llm-compressor's modifiers beside ours, at the same size: INT4 in groups of 32, or NVFP4.

    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --flat
    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --format nvfp4      # weights alone, its NVFP4A16

The library goes its users' route: a BF16 copy, loaded, `oneshot`, saved, stitched as ours is. AWQ's mapping has the
router (library_route.py); where more reads the norm, it has w3 and w2 alone, and so has ours. All get the same tokens.

The tiny MiniMax-M2 has outlier channels by powers of two, which AWQ folds away; `--flat` adds the same function without
them. parts.py has ours without one of its parts each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gguf_types import plain_tensors, written
from library_route import EXPERTS, awq_modifier, integers, load, oneshot
from loguru import logger
from measured_rows import Maker, Row, Table, recipe_job, row_options
from methods import calibration_data, spread
from parts import DEFAULT, PLAIN, Ours, rows_of

from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.device.devices import choose_device
from quantizers.planning.job import Job, prepare
from quantizers.recipe.schema import Awq, Experts
from quantizers.repair.stitch import stitch_experts
from quantizers.solve.llmcompressor_engine import quiet_library
from quantizers.system.formatting import text_table

NAME = "llm-compressor"


def library_rows(form: str, awq: Awq) -> dict[str, Callable[[], list[Any]]]:
    """The library's modifiers of each of its rows."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    if form == "nvfp4":
        groups: dict[str, Any] = {"experts": preset_name_to_scheme("NVFP4A16", [EXPERTS])}
        by_error = {}
    else:
        groups, mse = integers(Experts()), integers(Experts(), observer="mse")
        by_error = {
            f"{NAME}, to nearest, MSE observer": lambda: [QuantizationModifier(config_groups=mse)],
            f"{NAME} AWQ + GPTQ, MSE observer": lambda: [awq_modifier(awq), GPTQModifier(config_groups=mse)],
        }
    return {
        f"{NAME}, to nearest": lambda: [QuantizationModifier(config_groups=groups)],
        f"{NAME} GPTQ": lambda: [GPTQModifier(config_groups=groups)],
        f"{NAME} AWQ": lambda: [awq_modifier(awq), QuantizationModifier(config_groups=groups)],
        f"{NAME} AWQ + GPTQ": lambda: [awq_modifier(awq), GPTQModifier(config_groups=groups)],
        **by_error,
    }


def ours(form: str) -> dict[str, Ours]:
    """The rows that this program makes."""
    if form == "nvfp4":
        rows = rows_of(Experts(format="nvfp4"))
        return {"ours, to nearest": rows["to nearest"], DEFAULT: rows[DEFAULT], "ours, in INT4": Ours(Experts())}
    rows = rows_of(Experts())
    return {"ours, to nearest": rows["to nearest"], f"ours, {PLAIN}": rows[PLAIN], DEFAULT: rows[DEFAULT]}


@quiet_library()
def by_the_library(
    job: Job, data: CalibrationData, copy: Path, modifiers: Callable[[], list[Any]], work: Path
) -> Checkpoint:
    """The output of some of the library's modifiers, in a new folder; `copy` is the model in BF16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's use of torch and transformers warns
        model = load(copy, job.facts)
        oneshot(model, token_tensors(data, job.facts.vocab_size), modifiers())
        model.save_pretrained(work / "saved", save_compressed=True)
        stitch_experts(
            job.opened.folder,
            work / "saved",
            work / "stitched",
            repair_router=job.plan.folds,
            facts=job.facts_file,
            device="cpu",
        )
    return open_folder(work / "stitched")


def compare_modifiers(job: Job, given: argparse.Namespace, *, flat: bool) -> list[Row]:
    """Every row on the recipe's held-out set, as far as it is wanted; if `flat`, of the model without outliers."""
    device = choose_device(given.device)
    with tempfile.TemporaryDirectory() as folder:
        copy = written(plain_tensors(job, flat), job.opened, Path(folder) / "bf16")
        job = prepare(str(job.path), source_folder=copy) if flat else job
        data = spread(calibration_data(job), given.tokens)
        makers: dict[str, Maker] = {
            name: partial(by_the_library, job, data, copy, modifiers)
            for name, modifiers in library_rows(given.format, Awq(fold=job.plan.folds)).items()
        }
        makers |= {name: partial(row.output, job, data, device=device) for name, row in ours(given.format).items()}
        return Table(job, given, f"modifiers, {given.format}{', flat' if flat else ''}").measure(makers)


def modifiers_table(rows_by_model: dict[str, Sequence[dict[str, Any]]]) -> str:
    """The rows of each model as text; ratios are relative to the best of the library's, or of all without any."""
    columns, cells = ["experts"], [[row["name"]] for row in next(iter(rows_by_model.values()))]
    for model, rows in rows_by_model.items():
        best = min(row["kl"] for row in [row for row in rows if row["name"].startswith(NAME)] or rows)
        columns += [f"KL{model}", "ratio", "median", "top-1"]
        for cell, row in zip(cells, rows, strict=True):
            cell += [f"{row['kl']:.5f}", f"{row['kl'] / best:.2f}", f"{row['median']:.5f}", f"{row['top1']:.1%}"]
    return text_table(columns, cells)


def main() -> None:
    """Compare all rows on a recipe's model."""
    parser = row_options(__doc__)
    parser.add_argument("--format", choices=["int4", "nvfp4"], default="int4", help="of the experts")
    parser.add_argument("--flat", action="store_true", help="measure the model without its outlier channels too")
    given = parser.parse_args()
    job = recipe_job(given.recipe)
    with suppress(ValueError):  # it is there already
        logger.level("METRIC", no=38)  # GPTQ logs at this level, which the library lacks where its log is off
    models = {"": False} | ({", flat": True} if given.flat else {})
    rows_by_model = {name: compare_modifiers(job, given, flat=flat) for name, flat in models.items()}
    print(json.dumps(rows_by_model, indent=1) if given.json else modifiers_table(rows_by_model))


if __name__ == "__main__":
    main()
