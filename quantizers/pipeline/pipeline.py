"""A run from start to finish: what an earlier call left, inputs, memory, the layers, report, and the move into place.

An unfinished output never looks finished: everything is written under DIR/.quantize/ and renamed into
place at the very end.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantizers.budget.choice import choose_schemes
from quantizers.checkpoint.window import schedule
from quantizers.distributed.process_group import RESUME
from quantizers.eval.report.schema import PlannedRun
from quantizers.hooks import required
from quantizers.output import journal
from quantizers.output.uploads import Uploads
from quantizers.planning.job import Job, parts_of_run
from quantizers.recipe.portable import resolve_recipe
from quantizers.solve.kernel_check import verify_kernels
from quantizers.stitch.write.config_files import write_config_files
from quantizers.system.errors import InputError
from quantizers.system.files import copy_file, ready_file, write_text
from quantizers.system.interrupts import interruptible
from quantizers.walk.context import Context

from . import publication as publishing
from .consumers import NOT_CHECKED, NotChecked, plan_findings
from .conversion import make_conversion, refuse_options
from .fingerprint import refuse_different_ranks
from .finished import already_done, warn_of_another_source
from .inputs import Inputs, read_inputs
from .options import Options
from .placement import disk_needs, share_memory, shared_limits
from .quantize import OBSERVED, quantize_layers
from .report import plan_figures, planned_report, refuse_unreadable, run_report, serving
from .report_files import write_report
from .resume import open_work_folder
from .source_check import check_source, refuse_source


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or the rest of it. Every process of a group calls this; rank 0 does all but the layers alone.

    Returns:
        The contents of report.json; nothing in ranks except 0.

    Raises:
        InputError: exit 2; also if this process differs from rank 0 in something that the output's bytes depend on.
        QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    dist, uploads = options.dist, None
    refuse_options(job, options)
    work = journal.work_folder(options.output, dist.node)
    if dist.is_main:
        _refuse_absent_rooms(job, options)
        warn_of_another_source(job)
        finished = journal.finished_report(options.output)
        if finished is not None:
            dist.broadcast_object(False)
            return already_done(job, options, finished)
        if isinstance(plan_findings(job), NotChecked):  # this and what is missing is said before a folder is made
            _say_unchecked(options)
        if job.opened.remote:
            schedule(job.opened, parts_of_run(job)).window(options.window)  # for its error
        resolve_recipe(job.recipe, job.path)
        journal.refuse_strangers(options.output)
        if options.imatrix:
            ready_file(options.imatrix_file, "--imatrix")
        uploads = publishing.uploads_of(options.destination, options.output)
    with interruptible(RESUME) as interrupt:
        check = dist.watch(interrupt)
        unfinished: bool = dist.broadcast_object(not (work / "moving").exists())
        if not unfinished and not dist.is_main:
            return {}
        if unfinished:
            verify_kernels(options.device, job.integers, dist)
            refuse_different_ranks(job, options)
        with journal.locked(options.output, dist):
            if unfinished and dist.is_main:
                make = _make_output if job.recipe.experts.convert is None else make_conversion
                with contextlib.closing(uploads) if uploads else contextlib.nullcontext():
                    make(job, options, work, check, uploads)
            elif unfinished:
                _quantize_share(job, options, work, check)
            publishing.open_up(uploads, options.destination)
            return journal.move_into_place(work, options.output) if dist.is_main else {}


def _refuse_absent_rooms(job: Job, options: Options) -> None:
    """Raise an InputError if the run is asked for what this installation, or a room of it, cannot do."""
    if observer := options.observer():
        observer.refuse(job)
    if job.as_served:
        required("served_model", f"{job.path}: verify.as_served")


def _say_unchecked(options: Options) -> None:
    """Say that nobody checks how servers read the output. Raises an InputError if it would be published on the way."""
    if options.destination:
        raise InputError(
            "--publish-as-you-go", NOT_CHECKED, "run without it, then `quantize publish --force REASON` publishes it"
        )
    print(NOT_CHECKED, file=sys.stderr)


def _quantize_share(job: Job, options: Options, work: Path, check: Callable[[], None]) -> None:
    """Do the part of all ranks except 0: their share of the layers."""
    dist = options.dist
    try:
        shared_limits(options)
        placed, texts = dist.broadcast_object()
        context = Context(work, options.device, placed, check, dist, window=options.window)
        check_source(job, texts, context, ignore=options.ignore_source_check)
        job = choose_schemes(job, None, context, options.output) if job.allocation else job
        quantize_layers(job, None, None, context, texts, observer=options.observer())
    finally:
        if dist.node:
            journal.leave(options.output, dist.node)


def _make_output(job: Job, options: Options, work: Path, check: Callable[[], None], uploads: Uploads | None) -> None:
    """Do rank 0's part: make work/output, up to the mark that lets it be moved into place."""
    started, dist = time.monotonic(), options.dist

    # What may be wrong is found before anything slow. The sets are read once: they may be edited during the run.
    inputs = read_inputs(job, dist, work)
    planned = planned_report(job, inputs.resolved, inputs.data, options.device)
    refuse_unreadable(job.opened)
    publishing.begin(uploads, options.destination, planned)
    placed, temporary = share_memory(job, inputs.lengths, [len(text.tokens) for text in inputs.texts], options)
    damaged = open_work_folder(job, inputs, options, work, check, uploads.shards if uploads else ())
    disk = disk_needs(job, inputs, options, planned.plan.output_bytes, temporary, uploads)
    journal.check_room(work, disk.layers + disk.probes, disk.remedies)
    dist.broadcast_object((placed, inputs.texts))
    context = Context(work, options.device, placed, check, dist, window=options.window, uploads=uploads)
    check_source(job, inputs.texts, context, ignore=options.ignore_source_check)

    # Within a budget, the layers are measured before their schemes are known.
    if job.allocation:
        job = choose_schemes(job, inputs.tokens, context, options.output)
        planned = _with_chosen_schemes(planned, job, inputs)
        journal.check_room(work, disk.layers, disk.remedies)
    stop = job.recipe.verify.stop if job.recipe.verify and not options.ignore_stop else None
    measured = quantize_layers(
        job,
        inputs.data,
        inputs.tokens,
        context,
        inputs.texts,
        damaged=damaged,
        stop=stop,
        observer=options.observer(),
    )

    # All that is not a shard, then the last reading and the report.
    _write_side_files(job, inputs, work / "output", with_data=options.with_data)
    check()
    figures = inputs.evaluation.figures(measured, "the output") if inputs.evaluation and measured else None
    if job.opened.remote and figures and not options.ignore_source_check:
        refuse_source(job, figures.perplexity.source, f"the {len(inputs.texts)} texts")
    report = run_report(planned, job, inputs.data, figures, started, context)
    published = publishing.published(report, options.destination, work / "output")
    write_report(work / "output", report.changed(published=published), inputs.resolved.texts())
    if observer := options.observer():
        print(observer.write(options.imatrix_file, work / OBSERVED, job, inputs.data), file=sys.stderr)
    publishing.finish(uploads, work, options.output, check)
    write_text("", work / "moving")


def _with_chosen_schemes(planned: PlannedRun, job: Job, inputs: Inputs) -> PlannedRun:
    """The planned report with the figures that depend on the layers' schemes."""
    name = inputs.resolved.recipe.source.model
    return planned.changed(
        plan=plan_figures(job.plan, job.facts), serving=serving(job.plan, job.facts, job.opened, name)
    )


def _write_side_files(job: Job, inputs: Inputs, output: Path, *, with_data: bool) -> None:
    """Write the configuration, the tokenizer's files, the recipe and its sets; with their data files if asked."""
    write_config_files(output, job.opened, job.plan, job.facts)
    for name, text in inputs.resolved.texts().items():
        write_text(text, output / name)
    for name, file in inputs.resolved.data.items() if with_data else ():
        copy_file(file, output / name)
