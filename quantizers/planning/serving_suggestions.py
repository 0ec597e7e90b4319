"""Changes that would make an output fit on GPUs that are too small, each checked by the estimate."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .allocation import candidates
from .gpus import Gpus
from .job import Job
from .plan import file_size
from .serving_memory import Fit, KvType, Model, fit, serving_model

MOST_GPUS = 64  # more of the same are not proposed
USEFUL = 1024  # tokens; a context that is shorter is no remedy


@dataclass(frozen=True)
class Remedy:
    """One change, and the estimate with it.

    Attributes:
        say: what to give or to change.
        fit: fits.
    """

    say: str
    fit: Fit

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"say": self.say, "fit": self.fit.as_dict()}


def remedies(
    job: Job, model: Model, asked: Sequence[tuple[Gpus, Fit]], tensor_parallel: int | None = None
) -> list[list[Remedy]]:
    """For each set of GPUs what would fit, the cheapest first; nothing where it fits already.

    Args:
        model: of the job's plan.
        asked: sets of GPUs with their estimates.
        tensor_parallel: as the user gave it; None to let the estimate choose.
    """
    smaller = [] if all(found.fits for _, found in asked) else list(_smaller(job))
    return [[] if found.fits else list(_found(model, smaller, gpus, found, tensor_parallel)) for gpus, found in asked]


def _found(
    model: Model, smaller: Sequence[tuple[str, Model]], gpus: Gpus, asked: Fit, tensor_parallel: int | None
) -> Iterator[Remedy]:
    def tried(kv: KvType, context: int = asked.context) -> Fit:
        return fit(model, gpus, context, kv, tensor_parallel)

    whole = tried("fp8")
    if whole.fits:
        yield Remedy("--kv fp8", whole)
    if asked.longest >= USEFUL:
        yield Remedy(f"--context {asked.longest}", tried(asked.kv, asked.longest))
    if asked.kv == "auto" and not whole.fits and whole.longest >= USEFUL:
        yield Remedy(f"--kv fp8 --context {whole.longest}", tried("fp8", whole.longest))
    for say, other in smaller:
        found = fit(other, gpus, asked.context, asked.kv)
        if found.fits and tensor_parallel in (None, found.tensor_parallel):
            yield Remedy(f"{say} in the recipe", found)
            break
    both = asked.kv == "auto" and not whole.fits
    yield from _more_gpus(model, gpus, asked, tensor_parallel, ("auto", "fp8") if both else (asked.kv,))


def _more_gpus(
    model: Model, gpus: Gpus, asked: Fit, tensor_parallel: int | None, kvs: Sequence[KvType]
) -> Iterator[Remedy]:
    """The smallest number of such GPUs that is enough; a still smaller one with the next of `kvs`."""
    step, most = tensor_parallel or 1, MOST_GPUS
    for kv in kvs:
        option = "" if kv == asked.kv else f" --kv {kv}"
        for count in range(gpus.count + step, most + 1, step):
            found = fit(model, gpus.of(count), asked.context, kv, tensor_parallel)
            if found.fits:
                yield Remedy(f"--vram {shlex.quote(found.cards)}{option}", found)
                most = count - 1
                break


def _smaller(job: Job) -> Iterator[tuple[str, Model]]:
    """The output with each scheme that has fewer bits than now, the most bits first, and the key that asks for it."""
    experts, now = job.recipe.experts, max(scheme.bits_per_weight for scheme in job.plan.schemes)
    for scheme in reversed(candidates(job.sizes, 1)):
        if scheme.bits_per_weight >= now:
            continue
        plan = job.plan.with_schemes([scheme] * job.plan.layers)
        say = f"bits: {scheme.bits} with group_size: {scheme.group_size}"
        if experts.bits_per_weight is not None:
            say = f"bits_per_weight: {scheme.bits_per_weight:g}"
        elif experts.budget is not None:
            say = f"budget: {sum(file_size(plan.shard(part)) for part in plan.parts)}B"
        yield f"experts.{say}", serving_model(plan, job.facts, job.sizes, job.config, job.fp8)
