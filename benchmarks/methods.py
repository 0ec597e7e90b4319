"""Compares methods: same source, same tokens, one process, one table.

    python benchmarks/methods.py tiny-minimax-m2-fp8-int4 --tokens 16384

Seconds are observe + solve, summed over the layers. Reading, writing, propagation and evaluation are the same
for all methods and are not counted, nor are imports. The library's engine collects its own activations while
solving, so for it the observe phase, which then only serves the coverage counts, is not counted either.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from measured_rows import Row, Table, recipe_job, row_options

from quantizers.architectures.architecture import EXPERTS, ROUTER, Architecture
from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.device.devices import choose_device, forward_dtype, machine, versions
from quantizers.formats.fp8 import block_size
from quantizers.output import journal
from quantizers.pipeline.quantize import quantize_layers
from quantizers.planning.assign_actions import make_plan, obstacle
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import Job
from quantizers.recipe.read import set_location
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import llmcompressor_engine
from quantizers.solve.llmcompressor_engine import solve_with_llmcompressor
from quantizers.solve.result import LayerResult
from quantizers.stitch.write.config_files import write_config_files
from quantizers.system.errors import InputError
from quantizers.system.formatting import text_table
from quantizers.walk.context import Context


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        compensate_router: the router is multiplied by the scales that were folded into the norm that it reads.
        others_left_out: scales are folded into the norm although more than the router and the experts reads it, and
            what else does is left as it is.
        router: the dtype in which the compensated router is written; None for the one in which servers hold it.
    """

    name: str
    experts: Experts
    compensate_router: bool = True
    others_left_out: bool = False
    router: Literal["F32", "BF16"] | None = None


@dataclass(frozen=True)
class Methods:
    """The rows of the table.

    Attributes:
        rows: in their order.
        base: the name of the row that the others are compared with: the library's AWQ as far as it is exact.
        left_out: why a row does not apply to the family, or would repeat another one, by its name.
    """

    rows: list[Method]
    base: str
    left_out: dict[str, str]


def methods(base: Experts, facts: Architecture, dtype: torch.dtype) -> Methods:
    """Round to nearest, the library's AWQ with and without the router, and ours, adding one improvement at a time.

    Then ours without the fold, and with the router unrounded: what the fold gains, and what writing the compensated
    router in bfloat16 costs where servers hold it so.

    Where the norm has other readers, nothing may be folded into it. The library folds nevertheless with the mapping
    that it keeps for such a family, and compensates the router and the experts alone: that takes the place of the row
    without the router. Ours is shown without any scales besides.

    Args:
        base: gives the bits and group size of all methods.
        facts: of the source's family: whether scales are folded into the norm, and the router's dtype in servers.
        dtype: of the forward pass that measures, which rounds such a router where it is bfloat16.
    """

    def experts(**changes: Any) -> Experts:
        return base.model_copy(update={"awq": Awq(), "engine": "gram"} | changes)

    plain = {"scales": "minmax", "rounding": "nearest", "routed_weight": 0.0}
    best = {"scales": "mse", "rounding": "gptq", "routed_weight": 0.9}
    library, default = experts(engine="llmcompressor", **plain), experts(**best)
    left_out: dict[str, str] = {}
    rows = [Method("round to nearest", experts(awq=False, **plain))]
    against = obstacle(facts, "llmcompressor")
    if against is None:
        rows.append(Method("llm-compressor AWQ, router left out", library, compensate_router=False))
        compared = Method("llm-compressor AWQ, router compensated", library)
    else:
        left_out |= dict.fromkeys(
            ("llm-compressor AWQ, router left out", "llm-compressor AWQ, router compensated"), against
        )
        if facts.also_reads_the_norm:
            rows.append(Method("llm-compressor AWQ, other readers left out", library, others_left_out=True))
        compared = Method("llm-compressor AWQ, norm not folded", library)
    rows += [
        compared,
        Method("gram AWQ, minmax, nearest, a = 0", experts(**plain)),
        Method("gram AWQ, mse, nearest, a = 0.9", experts(scales="mse", rounding="nearest", routed_weight=0.9)),
        Method("gram AWQ, mse, gptq, a = 0", experts(scales="mse", rounding="gptq", routed_weight=0.0)),
        Method("gram AWQ, mse, gptq, a = 0.9 (default)", default),
    ]
    kept, unrounded = "gram AWQ, default, norm not folded", "gram AWQ, default, router in F32"
    against = obstacle(facts, "gram")
    if against is not None:
        rows.append(Method("gram without scales, mse, gptq, a = 0.9", experts(awq=False, **best)))
        return Methods(rows, compared.name, left_out | dict.fromkeys((kept, unrounded), against))
    rows.append(Method(kept, default.model_copy(update={"awq": Awq(fold=False)})))
    if facts.router.served == "F32":
        left_out[unrounded] = "the default is that"
    elif dtype != torch.float32:
        left_out[unrounded] = "this machine's forward pass would round it"
    else:
        rows.append(Method(unrounded, default, router="F32"))
    return Methods(rows, compared.name, left_out)


def variant(job: Job, method: Method) -> Job:
    """The job with a method's settings, and with the plan that follows from them."""
    facts, source = job.facts, job.opened
    if method.router is not None:
        facts = facts.model_copy(update={"router": facts.router.model_copy(update={"served": method.router})})
    if method.others_left_out:
        readers = {"readers": [ROUTER, EXPERTS]}
        facts = facts.model_copy(update={"norm": facts.norm.model_copy(update=readers)})
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, specs, method.experts, str(source.folder), block_size(source))
    recipe = job.recipe.model_copy(update={"experts": method.experts})
    return replace(job, recipe=recipe, facts=facts, plan=plan)


def spread(data: CalibrationData, most: int) -> CalibrationData:
    """About `most` tokens of a set: every n-th sample, so that all its sources stay represented."""
    total = sum(len(sample.tokens) for sample in data.samples)
    step = max(1, round(total / most))
    return replace(data, samples=data.samples[::step])


def quantized(job: Job, data: CalibrationData, place: Path, device: torch.device) -> Checkpoint:
    """The output of a job on these samples, in a new folder; the journal of its layers lies beside it."""
    for name in ("layers", "output"):
        (place / name).mkdir(parents=True)
    context = Context(place, device, Placement(Residents(job.facts.num_experts, 1, 0)))
    quantize_layers(job, data, token_tensors(data, job.facts.vocab_size), context)
    write_config_files(place / "output", job.opened, job.plan, job.facts)
    return open_folder(place / "output")


def calibration_data(job: Job) -> CalibrationData:
    """The recipe's calibration samples."""
    assert job.source is not None
    location = set_location(job.recipe.calibration_set, job.path)
    trusts = job.recipe.source.trusts_tokenizer
    return load_set(location, job.source.folder, trusts, job.recipe.calibration_tokens)


def _library(*arguments: Any, compensate_router: bool, compensate: bool = True) -> LayerResult:
    """The library's engine as the solver calls it; or without compensating the router."""
    return solve_with_llmcompressor(*arguments, compensate_router=compensate_router and compensate)


def compare_methods(job: Job, given: argparse.Namespace) -> dict[str, Any]:
    """Run every method on the recipe's source and calibration set, and measure all on its held-out set's short texts.

    Args:
        given: of the command; seconds are the median of `repeats` runs, which give the same bytes each time.

    Returns:
        rows (`Row`, and seconds), `base` and `left_out` of `Methods`, and what they were measured on.
    """
    if job.allocation:
        raise InputError(job.path, "the methods share one scheme", "give a recipe with bits and group_size")
    device = choose_device(given.device)
    data = spread(calibration_data(job), given.tokens)
    compared = methods(job.recipe.experts, job.facts, forward_dtype(device))
    asked = {method.name: method for method in compared.rows}

    def make(method: Method, place: Path) -> Checkpoint:
        library = _library if method.compensate_router else partial(_library, compensate=False)
        with patch.object(llmcompressor_engine, "solve_with_llmcompressor", library):
            for repeat in range(given.repeats):
                output = quantized(variant(job, method), data, place / str(repeat), device)
        return output

    def seconds(name: str, place: Path) -> Row:
        counted = ("solve",) if asked[name].experts.engine == "llmcompressor" else ("observe", "solve")
        of_runs = []
        for run in place.iterdir():
            entries = journal.done_layers(run, job.facts.num_layers)
            # A layer without experts has neither.
            of_runs.append(sum(entry["seconds"].get(phase, 0.0) for entry in entries for phase in counted))
        return {"seconds": sorted(of_runs)[len(of_runs) // 2]}

    rows = Table(job, given, "methods").measure({name: partial(make, row) for name, row in asked.items()}, seconds)
    return {
        "rows": rows,
        "base": compared.base,
        "left_out": compared.left_out,
        "repeats": given.repeats,
        "calibration": data.summary(),
        "machine": machine(device),
        "versions": versions(),
    }


def methods_table(result: dict[str, Any]) -> str:
    """The rows as text; ratios are relative to the row that `base` names, or to the last where that is left out."""
    rows = result["rows"]
    base = next((row for row in rows if row["name"] == result["base"]), rows[-1])
    cells = [
        (
            row["name"],
            f"{row['kl']:.4f}",
            f"{row['kl'] / base['kl']:.2f}",
            f"{row['top1']:.1%}",
            f"{row['router']:.1%}",
            f"{row['increase']:+.2%}",
            f"{row['seconds']:.1f}",
            f"{base['seconds'] / row['seconds']:.1f}x",
        )
        for row in rows
    ]
    calibration = result["calibration"]
    reasons: dict[str, list[str]] = {}
    for name, why in result["left_out"].items():
        reasons.setdefault(why, []).append(name)
    return text_table(("method", "KL", "ratio", "top-1", "router", "perplexity", "seconds", "faster"), cells) + (
        f"\n\n{calibration['tokens']:,} calibration tokens, {rows[0]['held_out_tokens']:,} held-out; "
        f"{result['machine']['threads']} threads; seconds: observe + solve, median of {result['repeats']}"
        + "".join(f"\nleft out: {'; '.join(names)}: {why}" for why, names in reasons.items())
    )


def main() -> None:
    """Compare all methods on a recipe's model."""
    parser = row_options(__doc__)
    parser.add_argument("--repeats", type=int, default=1, help="seconds are the median")
    given = parser.parse_args()
    result = compare_methods(recipe_job(given.recipe), given)
    print(json.dumps(result, indent=1) if given.json else methods_table(result))


if __name__ == "__main__":
    main()
