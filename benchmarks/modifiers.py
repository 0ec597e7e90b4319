"""KL of experts by each of llm-compressor's modifiers beside ours, at the same size: INT4 in groups of 32, or NVFP4.

    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --flat
    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --format nvfp4      # weights alone, its NVFP4A16

The library goes its users' route: a BF16 copy, loaded, `oneshot`, saved, stitched as ours is. AWQ's mapping has the
router (library_route.py); where more reads the norm, it has w3 and w2 alone, and so has ours. All get the same tokens.

The tiny MiniMax-M2 has outlier channels by powers of two, which AWQ folds away; `--flat` adds the same function without
them. parts.py has ours without one of its parts each.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gguf_types import plain_tensors, written
from library_route import EXPERTS, awq_modifier, integers, load, oneshot
from loguru import logger
from methods import calibration_data, held_out, options, recipe_job, spread
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
def by_the_library(job: Job, form: str, data: CalibrationData, copy: Path, work: Path) -> dict[str, Checkpoint]:
    """The output of each of the library's rows, in new folders; `copy` is the model in BF16."""
    outputs, tokens = dict[str, Checkpoint](), token_tensors(data, job.facts.vocab_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's use of torch and transformers warns
        for number, (name, modifiers) in enumerate(library_rows(form, Awq(fold=job.plan.folds)).items()):
            saved, output = work / f"saved-{number}", work / f"stitched-{number}"
            model = load(copy, job.facts)
            oneshot(model, tokens, modifiers())
            model.save_pretrained(saved, save_compressed=True)
            stitch_experts(
                job.opened.folder, saved, output, repair_router=job.plan.folds, facts=job.facts_file, device="cpu"
            )
            outputs[name] = open_folder(output)
    return outputs


def compare_modifiers(job: Job, form: str, tokens: int, device: torch.device, *, flat: bool) -> list[dict[str, Any]]:
    """KL, its median and top-1 of every row on the recipe's held-out set; if `flat`, of the model without outliers."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy = written(plain_tensors(job, flat), job.opened, work / "bf16")
        job = prepare(str(job.path), source_folder=copy) if flat else job
        data = spread(calibration_data(job), tokens)
        outputs = by_the_library(job, form, data, copy, work)
        for number, (name, row) in enumerate(ours(form).items()):
            outputs[name] = row.output(job, data, work / str(number), device)
        results = held_out(job, list(outputs.values()), work / "eval", device)
    return [
        {"method": name, "kl": result["kl"]["mean"], "median": result["kl"]["median"], "top1": result["top1"]}
        for name, result in zip(outputs, results, strict=True)
    ]


def modifiers_table(rows_by_model: dict[str, Sequence[dict[str, Any]]]) -> str:
    """The rows of each model as text; ratios are relative to the best of the library's."""
    columns, cells = ["experts"], [[row["method"]] for row in next(iter(rows_by_model.values()))]
    for model, rows in rows_by_model.items():
        best = min(row["kl"] for row in rows if row["method"].startswith(NAME))
        columns += [f"KL{model}", "ratio", "median", "top-1"]
        for cell, row in zip(cells, rows, strict=True):
            cell += [f"{row['kl']:.5f}", f"{row['kl'] / best:.2f}", f"{row['median']:.5f}", f"{row['top1']:.1%}"]
    return text_table(columns, cells)


def main() -> None:
    """Compare all rows on a recipe's model."""
    parser = options(__doc__)
    parser.add_argument("--format", choices=["int4", "nvfp4"], default="int4", help="of the experts")
    parser.add_argument("--flat", action="store_true", help="measure the model without its outlier channels too")
    given = parser.parse_args()
    job, device = recipe_job(given.recipe), choose_device(given.device)
    with suppress(ValueError):  # it is there already
        logger.level("METRIC", no=38)  # GPTQ logs at this level, which the library lacks where its log is off
    models = {"": False} | ({", flat": True} if given.flat else {})
    rows_by_model = {
        name: compare_modifiers(job, given.format, given.tokens, device, flat=flat) for name, flat in models.items()
    }
    print(json.dumps(rows_by_model, indent=1) if given.json else modifiers_table(rows_by_model))


if __name__ == "__main__":
    main()
