"""The work folder of a run, begun or resumed: the same settings, and finished shards with the bytes they had."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import torch

from quantizers.checkpoint.source_identity import check_hashes
from quantizers.output import journal
from quantizers.output.journal import Shard
from quantizers.planning.job import Job
from quantizers.recipe.portable import source_name
from quantizers.system.errors import OutputError
from quantizers.system.files import sync_folder
from quantizers.system.formatting import short_path, size
from quantizers.system.progress import progress

from .fingerprint import deciding
from .inputs import Inputs
from .options import Options


def open_work_folder(
    job: Job, inputs: Inputs | None, options: Options, work: Path, check: Callable[[], None], uploaded: Container[str]
) -> list[int]:
    """Begin or resume in the work folder, and say so on standard error; the layers whose shards must be made again.

    What the run was begun with must be the same, and the texts that its finished layers were measured on; but it may
    resume without any. A run that converts has no inputs.

    Raises:
        OutputError: the run was begun with other settings, or without a held-out set.
    """
    output = options.output
    journal.refuse_changes(work, deciding(job, inputs.data if inputs else None, options.device), output)
    journal.note_command(work, options.command)
    shards = journal.done_shards(work, job.facts.num_layers)
    print(_opening_line(job, options, inputs, len(shards)), file=sys.stderr, flush=True)
    if inputs and inputs.evaluation:
        if shards and not (work / journal.HELD_OUT).exists():
            raise OutputError(
                output,
                "its finished layers were measured on no held-out set",
                "leave verify.perplexity out as before, or start over with --fresh",
            )
        as_served = {"as_served": job.as_served} if job.as_served else {}
        measured = {"held_out": inputs.evaluation.identity} | as_served
        journal.refuse_changes(work, measured, output, journal.HELD_OUT)
    journal.remove_cut_files(work)
    damaged = _find_damage(work, shards, output, check, uploaded)
    if options.paranoid:
        check_hashes(job.opened, work, output, check)
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    sync_folder(work)
    return damaged


def _find_damage(
    work: Path, shards: Sequence[Shard], output: Path, check: Callable[[], None], uploaded: Container[str]
) -> list[int]:
    """The finished layers of an earlier call whose shards are no longer as they were written; each is named."""
    for passthrough in work.glob("passthrough-*.json"):
        if journal.damaged_shards(work, [journal.shard_of(json.loads(passthrough.read_text()))], uploaded=uploaded):
            passthrough.unlink()  # its shard is written at the beginning, so it will be written again
    if not shards:
        return []
    with progress("checking", len(shards), unit="shard", check=check) as step:
        damaged = journal.damaged_shards(work, shards, step, uploaded)
    for layer, problem in damaged.items():
        print(f"{output}: layer {layer}: {problem}; it is made again", file=sys.stderr)
    return list(damaged)


def _opening_line(job: Job, options: Options, inputs: Inputs | None, done: int) -> str:
    """The line with which a run begins: the source's published name, its size, output, device, tokens, layers done.

    It gives no time: the rates of `plan` are not this machine's. After the first layer the progress has a measured one.
    """
    layers, dense = job.facts.num_layers, len(job.facts.dense)
    threads = torch.get_num_threads()
    place = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    if options.device.type != "cpu":
        place = f"{options.device} ({torch.cuda.get_device_name(options.device)})"
    if options.dist.is_distributed:
        place += f", one of {options.dist.world_size} processes"
    source = sum(action.spec.bytes for action in job.plan.actions)
    routed = f"{layers - dense} of {layers} layers" if dense else f"{layers} layer{'s' if layers > 1 else ''}"
    what = f"experts converted to {job.recipe.experts.convert}"
    if inputs:
        tokens, held_out = inputs.counts
        what = f"{tokens:,} calibration{f' and {held_out:,} held-out' if held_out else ''} tokens"
    resuming = f"; resuming after layer {done} of {layers}" if done else ""
    name = source_name(job.recipe.source.model, job.path.parent)
    return (
        f"{name} ({size(source)}, {routed} × {job.facts.num_experts} experts) → "
        f"{short_path(options.output)} on {place}; {what}{resuming}"
    )
