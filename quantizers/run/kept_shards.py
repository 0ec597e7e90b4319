"""Shards that nothing computes anew: what lies outside the layers, and layers that are only copied."""

from __future__ import annotations

from quantizers.checkpoint.held import hold
from quantizers.checkpoint.reader import Checkpoint
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.system.files import write_json
from stitch.audit.layer import written_from
from stitch.write.shard import kept_hashes, layer_tensors, write_shard


def write_kept(job: Job, outside: Checkpoint, context: Context) -> None:
    """Write every shard that nothing computes anew, and its journal entry, unless that is done.

    Args:
        outside: the tensors outside the layers. Those of a layer that predicts further tokens are read here, one layer
            at a time.
    """
    plan, source = job.plan, job.opened
    for part in plan.kept_parts:
        file, shard = journal.kept_file(context.work, part), context.work / "output" / plan.shard_file(part)
        if file.exists() and shard.exists():
            continue
        actions = plan.of_layer(part)
        stored = outside if part is None else hold(source, [action.source for action in actions])
        kept = kept_hashes(plan, part, stored)
        digest = write_shard(layer_tensors(plan, part, stored, None).host, shard, kept, plan.carried(part))
        write_json(file, {"shard": shard.name, "digest": digest, "audit": written_from(actions).as_dict()})
        context.check()
