"""Compares methods: same source, same tokens, one process, one table.

Seconds are observe + solve, summed over the layers. Reading, writing, propagation and evaluation are the same
for all methods and are not counted, nor are imports. The library's engine collects its own activations while
solving, so for it the observe phase, which then only serves the coverage counts, is not counted either.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.data import CalibrationData
from quantizers.calibration.samples import samples
from quantizers.calibration.texts import token_tensors
from quantizers.checkpoint.reader import block_size, open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.device.devices import forward_dtype, machine, versions
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.folding import folds
from quantizers.plan.job import Job
from quantizers.plan.making import make_plan
from quantizers.recipe.locations import set_location
from quantizers.recipe.schema import Awq, Experts
from quantizers.run.layer_loop import quantize_layers
from quantizers.run.measure import measure
from quantizers.run.pipeline import assemble
from quantizers.system.errors import InputError
from quantizers.system.residents import Residents


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        router: the dtype in which the compensated router is written; None for the one in which servers hold it.
    """

    name: str
    experts: Experts
    compensate_router: bool = True
    router: Literal["F32", "BF16"] | None = None


def methods(base: Experts, facts: Architecture, dtype: torch.dtype) -> list[Method]:
    """Round to nearest, the library's AWQ with and without the router, and ours, adding one improvement at a time.

    Then ours without the fold, and with the router unrounded: what the fold gains, and what writing the compensated
    router in bfloat16 costs where servers hold it so. A row that would repeat another one is left out.

    Args:
        base: gives the bits and group size of all methods.
        facts: of the source's family: whether scales are folded into the norm, and the router's dtype in servers.
        dtype: of the forward pass that measures, which rounds such a router where it is bfloat16.
    """

    def experts(**changes: Any) -> Experts:
        return base.model_copy(update={"awq": Awq(), "engine": "gram"} | changes)

    plain = {"scales": "minmax", "rounding": "nearest", "routed_weight": 0.0}
    library = experts(engine="llmcompressor", **plain)
    default = experts(scales="mse", rounding="gptq", routed_weight=0.9)
    rows = [Method("round to nearest", experts(awq=False, **plain))]
    if folds(facts, library, "the benchmark"):
        rows.append(Method("llm-compressor AWQ, router left out", library, compensate_router=False))
    rows += [
        Method("llm-compressor AWQ, router compensated", library),
        Method("gram AWQ, minmax, nearest, a = 0", experts(**plain)),
        Method("gram AWQ, mse, nearest, a = 0.9", experts(scales="mse", rounding="nearest", routed_weight=0.9)),
        Method("gram AWQ, mse, gptq, a = 0", experts(scales="mse", rounding="gptq", routed_weight=0.0)),
        Method("gram AWQ, mse, gptq, a = 0.9 (default)", default),
    ]
    if folds(facts, default, "the benchmark"):
        kept = default.model_copy(update={"awq": Awq(fold=False)})
        rows.append(Method("gram AWQ, default, norm not folded", kept))
        if facts.router.served == "BF16" and dtype == torch.float32:
            rows.append(Method("gram AWQ, default, router in F32", default, router="F32"))
    return rows


def variant(job: Job, method: Method) -> Job:
    """The job with a method's settings, and with the plan that follows from them."""
    facts, source = job.facts, job.opened
    if method.router is not None:
        facts = facts.model_copy(update={"router": facts.router.model_copy(update={"served": method.router})})
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, job.sizes, specs, method.experts, str(source.folder), block_size(source))
    recipe = job.recipe.model_copy(update={"experts": method.experts})
    return replace(job, recipe=recipe, facts=facts, plan=plan)


def spread(data: CalibrationData, most: int) -> CalibrationData:
    """About `most` tokens of a set: every n-th sample, so that all its sources stay represented."""
    total = sum(len(sample.tokens) for sample in data.samples)
    step = max(1, round(total / most))
    return replace(data, samples=data.samples[::step])


def compare_methods(
    job: Job, device: torch.device, repeats: int, most_tokens: int, work: Path | None = None
) -> dict[str, Any]:
    """Run every method on the recipe's source and calibration set, and measure all on its held-out set's short texts.

    Args:
        most_tokens: approximate number of calibration tokens; see `spread`.
        repeats: runs of each method; seconds are the median. The bytes are the same each time.
        work: folder for the temporary outputs; the system's by default.

    Returns:
        rows (method, seconds, kl, top1, perplexity increase, router), and what they were measured on.
    """
    source = job.source
    if job.allocation:
        raise InputError(f"{job.path}: the methods share one scheme; give a recipe with bits and group_size")
    assert source is not None
    assert job.recipe.verify is not None
    assert job.recipe.verify.perplexity is not None
    recipe = job.recipe
    whole = samples(
        set_location(recipe.calibration_set, job.path),
        source.folder,
        recipe.source.trusts_tokenizer,
        recipe.calibration_tokens,
    )
    data = spread(whole, most_tokens)
    tokens = token_tensors(data, job.sizes["vocabulary"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=work) as folder:
        outputs = []
        for number, method in enumerate(methods(job.recipe.experts, job.facts, forward_dtype(device))):
            changed = variant(job, method)
            seconds = []
            for repeat in range(repeats):
                place = Path(folder) / f"{number}-{repeat}"
                for name in ("layers", "output"):
                    (place / name).mkdir(parents=True)
                context = Context(place, device, Residents.all_of(job.sizes["experts"]))
                quantize_layers(changed, data, tokens, context, compensate_router=method.compensate_router)
                counted = ("solve",) if method.experts.engine == "llmcompressor" else ("observe", "solve")
                entries = journal.done_layers(place, job.sizes["layers"])
                seconds.append(sum(entry["seconds"][phase] for entry in entries for phase in counted))
            assemble(changed, place / "output")
            outputs.append(open_folder(place / "output"))
            rows.append({"method": method.name, "seconds": sorted(seconds)[len(seconds) // 2]})
        held_out = set_location(job.recipe.verify.perplexity.data, job.path)
        results = measure(
            source, outputs, held_out, device, Path(folder) / "eval",
            long=False, trust_remote_code=job.recipe.source.trusts_tokenizer, own=job.own,
        )  # fmt: skip
    for row, result in zip(rows, results, strict=True):
        row |= {
            "kl": result["kl"]["mean"],
            "top1": result["top1"],
            "increase": result["perplexity"]["increase"],
            "router": result["router"]["min"],
        }
    return {
        "rows": rows,
        "repeats": repeats,
        "calibration": data.summary(),
        "held_out_tokens": results[0]["tokens"],
        "machine": machine(device),
        "versions": versions(),
    }
