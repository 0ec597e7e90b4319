"""Several processes begin a run only if they would all compute the same bits, from the same bytes, for the same recipe.

A layer's bytes are compared by their hashes when they are read, see checkpoint/shared_reading.py.
"""

from __future__ import annotations

from typing import Any

from quantizers.checkpoint.source_identity import source_digest
from quantizers.device.devices import fingerprint, versions
from quantizers.output.fingerprint import differences, short_value
from quantizers.planning.job import Job
from quantizers.recipe.portable import settings_hash
from quantizers.system.errors import InputError

from .options import Options

REMEDIES = {
    "source": "copy the source of rank 0 to this machine again",
    "recipe": "start the same command with the same recipe and sets on all machines",
    "states": "give all processes the same --states",
}


def agree(job: Job, options: Options) -> None:
    """Compare what decides bits with rank 0; all processes call this.

    Raises:
        InputError: this process differs from rank 0; the message names it, and the first difference.
    """
    dist = options.dist
    if not dist.is_distributed:
        return
    own = _of_this_process(job, options)
    first = dist.broadcast_object(own)
    for key, wanted, found in differences(first, own):
        remedy = REMEDIES.get(key, "give all processes the same")
        if key == "machine.threads":
            remedy = f"set OMP_NUM_THREADS={wanted} for all"
        raise InputError(f"{dist.name} has {key} {short_value(found)}, but rank 0 has {short_value(wanted)}; {remedy}")
    dist.barrier()  # so that a difference is known before anything is written


def _of_this_process(job: Job, options: Options) -> dict[str, Any]:
    return {
        "versions": versions(),
        "machine": fingerprint(options.device),
        "recipe": settings_hash(job.recipe, job.path),
        "source": source_digest(job.opened),
        "states": options.states,
    }
