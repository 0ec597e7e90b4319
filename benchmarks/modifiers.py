"""KL of experts by each of llm-compressor's modifiers beside ours, at the same size: INT4 in groups of 32, or NVFP4.

    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --tokens 16384
    python benchmarks/modifiers.py tiny-minimax-m2-fp8-int4 --format nvfp4      # weights alone, its NVFP4A16

The library goes its users' whole route, with the router in AWQ's mapping (library_route.py); all get the same tokens.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from library_route import EXPERTS, awq_modifier, convert, load, oneshot, quantization_modifier
from methods import Method, calibration_data, held_out, options, quantized, recipe_job, spread, variant

from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.commands.stitch import stitch
from quantizers.device.devices import choose_device
from quantizers.planning.job import Job
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.llmcompressor_engine import quiet_library
from quantizers.system.formatting import text_table

LIBRARY: dict[str, Callable[[Any, Any], list[Any]]] = {
    "llm-compressor, its observer": lambda nearest, _: [nearest],
    "llm-compressor GPTQ": lambda _, gptq: [gptq],
    "llm-compressor AWQ": lambda nearest, _: [awq_modifier(Awq()), nearest],
    "llm-compressor AWQ + GPTQ": lambda _, gptq: [awq_modifier(Awq()), gptq],
}


def ours(form: str) -> dict[str, Experts]:
    """The rows that this program makes."""
    experts = Experts(format="nvfp4") if form == "nvfp4" else Experts()
    plain: dict[str, Any] = {"awq": False, "scales": "minmax", "rounding": "nearest", "routed_weight": 0.0}
    rows = {
        "round to nearest": experts.model_copy(update=plain),
        "gram, norm not folded": experts.model_copy(update={"awq": Awq(fold=False)}),
        "gram (default)": experts,
    }
    return rows | ({"INT4 group 32 (default)": Experts()} if form == "nvfp4" else {})


@quiet_library()
def by_the_library(job: Job, form: str, data: CalibrationData, work: Path) -> list[Checkpoint]:
    """An output for each of LIBRARY's rows, with the source's attention, in new folders."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from loguru import logger

    logger.level("METRIC", no=38)  # GPTQ logs at this level, which the library lacks where its log is off
    outputs, tokens = [], token_tensors(data, job.sizes["vocabulary"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's use of torch and transformers warns
        convert(job.opened, work / "bf16")
        for number, modifiers in enumerate(LIBRARY.values()):
            integers = quantization_modifier(Experts()).config_groups
            groups = {"experts": preset_name_to_scheme("NVFP4A16", [EXPERTS])} if form == "nvfp4" else integers
            saved, output = work / f"saved-{number}", work / f"stitched-{number}"
            model = load(work / "bf16", job.facts)
            oneshot(
                model,
                tokens,
                modifiers(QuantizationModifier(config_groups=groups), GPTQModifier(config_groups=groups)),
            )
            model.save_pretrained(saved, save_compressed=True)
            stitch(job.opened.folder, saved, output, repair_router=True, facts=job.facts_file, device="cpu")
            outputs.append(open_folder(output))
    return outputs


def compare_modifiers(job: Job, form: str, tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """KL, its median and top-1 of every row on the recipe's held-out set."""
    data = spread(calibration_data(job), tokens)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        outputs = by_the_library(job, form, data, work)
        for number, experts in enumerate(ours(form).values()):
            outputs.append(quantized(variant(job, Method("", experts)), data, work / str(number), device))
        results = held_out(job, outputs, work / "eval", device)
    return [
        {"method": name, "kl": found["kl"]["mean"], "median": found["kl"]["median"], "top1": found["top1"]}
        for name, found in zip((*LIBRARY, *ours(form)), results, strict=True)
    ]


def modifiers_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text; ratios are relative to the best of the library's."""
    best = min(row["kl"] for row in rows if row["method"] in LIBRARY)
    cells = [
        (row["method"], f"{row['kl']:.5f}", f"{row['kl'] / best:.2f}", f"{row['median']:.5f}", f"{row['top1']:.1%}")
        for row in rows
    ]
    return text_table(("experts", "KL", "ratio", "median", "top-1"), cells)


def main() -> None:
    """Compare all rows on a recipe's model."""
    parser = options(__doc__)
    parser.add_argument("--format", choices=["int4", "nvfp4"], default="int4", help="of the experts")
    given = parser.parse_args()
    rows = compare_modifiers(recipe_job(given.recipe), given.format, given.tokens, choose_device(given.device))
    print(json.dumps(rows, indent=1) if given.json else modifiers_table(rows))


if __name__ == "__main__":
    main()
