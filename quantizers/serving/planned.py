"""The check that servers can read the output, made of its plan before anything long begins."""

from __future__ import annotations

from quantizers.planning.job import Job
from quantizers.planning.plan import KV_SCALE
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import CheckpointError

from .check import check
from .findings import ServingCheck


def planned_check(job: Job, one_expert: bool = False) -> ServingCheck:
    """Check how serving engines would read the planned output, from tensor headers alone.

    Args:
        one_expert: the first of a layer's experts stands for all, which are stored alike; this is faster.

    Raises:
        CheckpointError: one of them would read other weights than are stored; one line that names the tensors.
    """
    actions = (action for action in job.plan.actions if not (one_expert and action.expert))
    written = {name: spec for action in actions for name, spec in action.outputs.items()}
    written |= {name: KV_SCALE for layer in job.plan.cached for name in job.plan.kv_scales(layer)}
    facts = job.facts
    if one_expert:
        single = facts.sizes["experts"].model_copy(update={"value": 1})
        facts = facts.model_copy(update={"sizes": facts.sizes | {"experts": single}})
    checked = check(output_config(job.config, job.facts, job.plan), written, facts)
    for error in checked.errors:
        where = job.source.folder if job.source and not job.source.remote else job.location
        raise CheckpointError(
            where,
            f"of this source no output can be made that servers read: {error.sentence}",
            "give a source in which what servers fuse is stored alike",
        )
    return checked
