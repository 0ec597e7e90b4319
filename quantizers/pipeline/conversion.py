"""A run that converts (`experts.convert`): the same numbers in another format, without a text and without a model.

Each layer is read, converted, compared with the source value by value, and written; a value that does not fit ends the
run. What it shares with a run that quantizes, see pipeline.py: the journal, by which it resumes, a source that is
streamed, uploads as it goes, the last reading, and the move into place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from quantizers.checkpoint.loaded_tensors import load_once
from quantizers.checkpoint.reader import COMMIT, Checkpoint, side_files
from quantizers.checkpoint.window import schedule
from quantizers.device.devices import release_free_memory
from quantizers.distributed.process_group import SINGLE_PROCESS
from quantizers.formats.conversion import CONVERSIONS
from quantizers.formats.dequantization import read_weight
from quantizers.formats.format import RowFormat
from quantizers.formats.lossless import TARGETS, encoded, first_difference, holding
from quantizers.output import journal
from quantizers.output.uploads import Uploads
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import Job, parts_of_run
from quantizers.planning.plan import Action, Plan
from quantizers.recipe.portable import Resolved, resolve_recipe
from quantizers.stitch.audit.layer import written_from
from quantizers.stitch.write.config_files import write_config_files
from quantizers.stitch.write.shard import copy_shard, kept_hashes, layer_tensors, write_shard
from quantizers.system.errors import InputError, RecipeError
from quantizers.system.files import write_json, write_text
from quantizers.system.output_files import FACTS
from quantizers.system.progress import doing, peak_memory, progress
from quantizers.walk.context import Context
from quantizers.walk.walk import Watch, walk

from . import publication as publishing
from .layer_entry import ConvertedPart
from .options import Options
from .report import conversion_report, planned_conversion, refuse_unreadable
from .report_files import write_report
from .resume import open_work_folder


def refuse_options(job: Job, options: Options) -> None:
    """Raise an InputError for an option that a conversion cannot follow."""
    if job.recipe.experts.convert is None:
        return
    if options.dist.is_distributed:
        raise InputError(
            f"{job.path}: experts.convert", "a conversion works in one process", "start quantize without torchrun"
        )
    given = {
        "--imatrix": options.imatrix,
        "--device-memory": options.device_memory is not None,
        "--states": options.states != "auto",
        "--ignore-stop": options.ignore_stop,
        "--ignore-source-check": options.ignore_source_check,
    }
    for option in (option for option, is_given in given.items() if is_given):
        raise InputError(option, "has no effect on a conversion, which reads no texts", "leave it out")


def make_conversion(job: Job, options: Options, work: Path, check: Callable[[], None], uploads: Uploads | None) -> None:
    """Make work/output, up to the mark that lets it be moved into place.

    Raises:
        RecipeError: the format does not hold a value of the source.
    """
    started = time.monotonic()
    resolved = _resolved(job)
    planned = planned_conversion(job, resolved, options.device)
    refuse_unreadable(job.opened)
    publishing.begin(uploads, options.destination, planned)
    damaged = open_work_folder(job, None, options, work, check, uploads.shards if uploads else ())
    for layer in damaged:
        journal.layer_file(work, layer).unlink()
    _check_room(job, options, work, planned.plan.output_bytes, uploads)
    placed = Placement(Residents(1, 1, 0))  # nothing is kept from one layer to the next
    context = Context(work, options.device, placed, check, window=options.window, uploads=uploads)
    parts = convert_parts(job, context)

    output = work / "output"
    write_config_files(output, job.opened, job.plan, job.facts)
    for name, text in resolved.texts().items():
        write_text(text, output / name)
    check()
    report = conversion_report(planned, job, parts, started, context)
    published = publishing.published(report, options.destination, output)
    write_report(output, report.changed(published=published), resolved.texts())
    publishing.finish(uploads, work, options.output, check)
    write_text("", work / "moving")


def _resolved(job: Job) -> Resolved:
    """The recipe as it is published, which names no sets, with the source's commit."""
    commit = job.opened.revision if COMMIT.fullmatch(job.opened.revision or "") else None
    resolved = resolve_recipe(job.recipe, job.path, commit=commit)
    if job.facts.probes:  # derived ones, for those who have the output alone
        resolved = replace(resolved, sets={**resolved.sets, FACTS: job.facts.as_yaml()})
    return resolved


def _check_room(job: Job, options: Options, work: Path, output: int, uploads: Uploads | None) -> None:
    """Raise an OutputError if the disk has no room for shards of so many bytes, side files and the source's window."""
    remote, needed = job.opened.remote, output + sum(file.stat().st_size for file in side_files(job.opened.folder))
    if uploads and options.destination:
        needed -= max(job.plan.removed_bytes(1) if options.destination.remove else 0, uploads.removed_bytes)
    if remote:
        needed += schedule(job.opened, parts_of_run(job)).window(options.window)
    publish = "give --remove-uploaded" if uploads else "give --publish-as-you-go OWNER/NAME --remove-uploaded"
    journal.check_room(work, needed, ["give a smaller --window", publish] if remote else [publish])


# Parts ----------------------------------------------------------------------------------------------------------------


def convert_parts(job: Job, context: Context) -> list[ConvertedPart]:
    """Write all shards that are not written yet, with a journal entry for each; all entries, in the plan's order."""
    plan, work = job.plan, context.work
    files = {part: _entry_file(plan, work, part) for part in plan.parts}
    done = {part: ConvertedPart.model_validate_json(file.read_text()) for part, file in files.items() if file.exists()}
    left = [part for part in plan.parts if part not in done]
    layers = [part for part in left if part is not None and part < plan.layers]
    others = [part for part in left if part not in layers]
    names = {part: [action.source for action in plan.of_layer(part)] for part in left}
    context.upload(*(entry.file for entry in done.values()))  # unless an earlier call did
    with (
        context.streamed(job.opened, [*(names[part] for part in others), *(names[part] for part in layers)]) as source,
        progress("converting", len(files), len(done), kept=True) as shown,
    ):

        def finish(part: int | None, entry: ConvertedPart) -> None:
            done[part] = entry
            write_json(files[part], entry.as_dict())
            context.upload(entry.file)
            shown("outside the layers" if part is None else f"layer {part}")
            release_free_memory()

        for part in others:
            context.check()
            watch = Watch()
            if part is not None and part in plan.tables:
                finish(part, _copy_part(plan, part, source, context, watch))
                continue
            stored = load_once(source, names[part], SINGLE_PROCESS)
            watch.lap("read")
            finish(part, _convert_part(replace(job, source=stored), part, context, watch))
        with walk(source, {part: names[part] for part in layers}, check=context.check) as steps:
            for step in steps:
                made = _convert_part(replace(job, source=step.source), step.number, context, step.watch)
                finish(step.number, made)
    return [done[part] for part in plan.parts]


def _entry_file(plan: Plan, work: Path, part: int | None) -> Path:
    if part is None or part >= plan.layers:
        return journal.passthrough_file(work, part)
    return journal.layer_file(work, part)


def _convert_part(job: Job, part: int | None, context: Context, watch: Watch) -> ConvertedPart:
    """Convert a part whose tensors the job's source has in memory, and write its shard."""
    plan, stored = job.plan, job.opened
    doing("converting")
    made, values = dict[str, torch.Tensor](), 0
    for matrices, form in _together(plan, part):
        weights = [read_weight(stored, _module(action), context.device) for action in matrices]
        for action, tensors in zip(matrices, _proven(job, matrices, form, weights), strict=True):
            made |= {f"{_module(action)}.{last}": tensor.cpu() for last, tensor in tensors.items()}
        values += sum(map(torch.Tensor.numel, weights))
    watch.lap("convert")
    doing("writing")
    shard = plan.shard_file(part)
    tensors = layer_tensors(plan, part, stored, None, made=made).host
    digest = write_shard(tensors, context.work / "output" / shard, kept_hashes(plan, part, stored), plan.unread(part))
    watch.lap("write")
    return _entry(plan, part, digest, values, context, watch)


def _copy_part(plan: Plan, part: int, source: Checkpoint, context: Context, watch: Watch) -> ConvertedPart:
    """Write the shard of a layer's tables, which no memory holds."""
    doing("writing")
    digest = copy_shard(plan, part, source, context.work / "output" / plan.shard_file(part))
    source.release(action.source for action in plan.of_layer(part))
    watch.lap("write")
    return _entry(plan, part, digest, 0, context, watch)


def _entry(
    plan: Plan, part: int | None, digest: journal.ShardDigest, values: int, context: Context, watch: Watch
) -> ConvertedPart:
    """The journal's entry of a part whose shard is written, with so many values that were converted."""
    audit = written_from(plan.of_layer(part), values)
    return ConvertedPart(
        layer=part,
        seconds=watch.seconds,
        matrices=audit.converted,
        values=values,
        shard=plan.shard_file(part),
        digest=digest,
        audit=audit.as_dict(),
        peak_memory_bytes=peak_memory(context.device),
    )


def _module(action: Action) -> str:
    assert action.module is not None, "only matrices are converted"
    return action.module


def _together(plan: Plan, part: int | None) -> Iterator[tuple[Sequence[Action], RowFormat]]:
    """Matrices that are converted together, with their format: gate and up of an expert, for servers fuse them."""
    target = TARGETS[str(plan.experts.convert)].form
    converted = (action for action in plan.of_layer(part) if action.kind == "convert")
    for (expert, _), actions in groupby(converted, lambda action: (action.expert, action.matrix == "down")):
        if expert is None:
            yield from (([action], CONVERSIONS[plan.attention]) for action in actions)
        else:
            yield list(actions), target


def _proven(
    job: Job, matrices: Sequence[Action], form: RowFormat, weights: Sequence[torch.Tensor]
) -> Sequence[dict[str, torch.Tensor]]:
    """The tensors of matrices in a format, from which every value was read back as it is in their weights."""
    made = encoded(form, weights)
    for action, tensors, weight in zip(matrices, made, weights, strict=True):
        if (first := first_difference(form, tensors, weight)) is not None:
            routed = action.expert is not None
            where = f"experts.convert: {job.plan.experts.convert}" if routed else f"attention: {job.plan.attention}"
            raise RecipeError(
                f"{job.path}: {where}",
                f"{action.source} does not fit: row {first.row}, column {first.column} is {first.wanted:.9g} and would "
                f"become {first.stored:.9g}",
                _instead(matrices, weights) if routed else "remove the key, so that it keeps its bytes",
            )
    return made


def _instead(matrices: Sequence[Action], weights: Sequence[torch.Tensor]) -> str:
    """The remedy where a target does not hold an expert's matrices: those that do, as far as these tell."""
    already = {action.stored.form for action in matrices if action.stored}
    others = [name for name in holding(weights) if TARGETS[name].form not in already]
    if others:
        return f"give {' or '.join(others)}, which hold{'s' * (not others[1:])} it, or quantize instead"
    return "none of the formats holds it: quantize instead"
