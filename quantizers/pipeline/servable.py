"""The check that servers can read the output, made of its plan before anything long begins."""

from __future__ import annotations

import copy

from eval.serving.check import check
from quantizers.planning.job import Job
from quantizers.system.errors import CheckpointError
from stitch.write.config_files import output_config


def refuse_misread(job: Job) -> None:
    """Refuse a plan of whose output some server would read other weights than are stored, as far as headers say.

    Of each layer's experts, which are all stored alike, the first stands for all.

    Raises:
        CheckpointError: one line that names the tensors and the server.
    """
    first = (action for action in job.plan.actions if not action.expert)
    written = {name: spec for action in first for name, spec in action.outputs.items()}
    sizes = copy.copy(job.sizes)
    sizes["experts"] = 1
    found = check(output_config(job.config, job.facts, job.plan, job.fp8), written, job.facts, sizes)
    for error in found.errors:
        where = job.source.folder if job.source else job.location
        raise CheckpointError(
            f"{where}: of this source no output can be made that servers read: {str(error).removeprefix('error: ')}; "
            "give a source in which what servers fuse is stored alike"
        )
