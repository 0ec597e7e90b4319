"""Settings that the output's bytes depend on: a run resumes, and processes work together, only if they are equal."""

from __future__ import annotations

from typing import Any

import torch

from quantizers.calibration.samples import CalibrationData, identity
from quantizers.checkpoint.source_identity import source_digest, source_stats
from quantizers.device.devices import fingerprint, is_accelerator, versions
from quantizers.output import journal
from quantizers.output.manifest import text_sha256
from quantizers.planning.expert_batches import batch_sizes
from quantizers.planning.job import Job
from quantizers.recipe.portable import facts_copy, settings_hash
from quantizers.system.errors import InputError

from .options import Options

METHOD = 16  # increased whenever the same settings would give different bytes
REMEDIES = {
    "source": "copy the source of rank 0 to this machine again",
    "recipe": "start the same command with the same recipe and sets on all machines",
    "states": "give all processes the same --states",
}


def deciding(job: Job, data: CalibrationData | None, device: torch.device) -> dict[str, Any]:
    """Every setting that the output's bytes depend on; gates and logging are not among them."""
    facts = {name: text_sha256(text) for name, text in facts_copy(job.facts_file).items()}
    variant = {"attention": job.recipe.attention} if job.recipe.attention != "keep" else {}
    variant |= {"kv_cache": job.recipe.kv_cache} if job.recipe.kv_cache != "none" else {}
    remote, revision = job.opened.remote, job.recipe.source.revision
    commits = {"commits": {f"{job.location}@{revision}": remote.commit}} if remote else {}
    return {
        **facts,
        **commits,
        **variant,
        **({"calibration": identity(data.samples)} if data else {}),
        **({"calibration.tokens": data.drawn.asked} if data and data.drawn else {}),
        "method": METHOD,
        "experts": job.recipe.settings()["experts"],
        "source": source_stats(job.opened),
        "source_config": job.config,
        "machine": fingerprint(device),
        "batches": batch_sizes(is_accelerator(device), job.facts),
    }


def refuse_different_ranks(job: Job, options: Options) -> None:
    """Compare settings, machine and source with rank 0's; a layer's bytes are compared when they are read.

    Raises:
        InputError: this process has another value than rank 0.
    """
    dist = options.dist
    if not dist.is_distributed:
        return
    of_this_process = {
        "versions": versions(),
        "machine": fingerprint(options.device),
        "recipe": settings_hash(job.recipe, job.path),
        "source": source_digest(job.opened),
        "states": options.states,
        "imatrix": options.imatrix,
    }
    first = dist.broadcast_object(of_this_process)
    for key, wanted, value in journal.differences(first, of_this_process):
        remedy = REMEDIES.get(key, "give all processes the same")
        if key == "machine.threads":
            remedy = f"set OMP_NUM_THREADS={wanted} for all"
        ours, theirs = journal.short_value(value), journal.short_value(wanted)
        raise InputError("", f"{dist.name} has {key} {ours}, but rank 0 has {theirs}", remedy)
    dist.barrier()  # so that a difference is known before anything is written
