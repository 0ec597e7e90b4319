"""A run from start to finish: what an earlier call left, inputs, memory, the layers, report, and the move into place.

An unfinished output never looks finished: everything is written under DIR/.quantize/ and renamed into
place at the very end.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from quantizers.budget.choice import choose_schemes
from quantizers.budget.measure import probe_bytes
from quantizers.calibration.load_set import load_set, pins_of, print_notes
from quantizers.calibration.lock import Pin
from quantizers.calibration.samples import CalibrationData, identity, token_tensors
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import COMMIT, side_files
from quantizers.checkpoint.source_identity import check_hashes, is_source, source_digest, source_stats
from quantizers.checkpoint.window import schedule
from quantizers.device.devices import device_limit, fingerprint, forward_dtype, is_accelerator, versions
from quantizers.distributed.process_group import RESUME, SINGLE_PROCESS, ProcessGroup
from quantizers.eval.coverage.summary import check_floors
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import HeldOut, held_out
from quantizers.hooks import required
from quantizers.importance.input_sums import bytes_of_sums
from quantizers.output import journal
from quantizers.output.manifest import add_files, seal_of, text_sha256, write_record
from quantizers.output.uploads import Uploads
from quantizers.planning.device_memory import (
    DeviceMemory,
    Placement,
    Residents,
    device_memory,
    held_out_bytes,
    placement,
)
from quantizers.planning.expert_batches import batch_sizes
from quantizers.planning.job import Job, parts_of_run
from quantizers.recipe.portable import Resolved, facts_copy, is_made_by, meaning, resolve_recipe, settings_hash
from quantizers.recipe.read import read_recipe, set_location
from quantizers.solve.kernel_check import verify_kernels
from quantizers.stitch.write.config_files import write_config_files
from quantizers.system.errors import InputError, OutputError
from quantizers.system.files import copy_file, sync_folder, write_text
from quantizers.system.formatting import short_path, size
from quantizers.system.host_memory import available
from quantizers.system.interrupts import interruptible
from quantizers.system.output_files import CALIBRATION, FACTS, HELD_OUT, RECIPE
from quantizers.system.progress import progress
from quantizers.walk.context import Context

from . import publication as publishing
from .consumers import NOT_CHECKED, NotChecked, plan_findings
from .publication import Destination
from .quantize import IMATRIX, quantize_layers
from .report import plan_figures, planned_report, refuse_unreadable, run_report, serving
from .report_files import write_report
from .source_check import check_source, refuse_source

SHOWN = 3  # changed settings that a refusal names
METHOD = 14  # increased whenever the same settings would give different bytes
REMEDIES = {
    "source": "copy the source of rank 0 to this machine again",
    "recipe": "start the same command with the same recipe and sets on all machines",
    "states": "give all processes the same --states",
}


@dataclass(frozen=True)
class Options:
    """Execution settings of a run; none of them changes the meaning of a recipe.

    They are arguments of `quantizers.run`, but for `destination`: where the output is published as it is made; None to
    publish nothing.
    """

    output: Path
    device: torch.device
    device_memory: int | None = None
    paranoid: bool = False
    with_data: bool = False
    states: Literal["auto", "memory", "files"] = "auto"
    ignore_stop: bool = False
    ignore_source_check: bool = False
    dist: ProcessGroup = SINGLE_PROCESS
    command: tuple[str, ...] = ()
    imatrix: bool = False
    window: int | None = None
    destination: Destination | None = None

    @property
    def imatrix_file(self) -> Path:
        """OUTPUT.imatrix.gguf."""
        return self.output.with_name(f"{self.output.name}.imatrix.gguf")


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or the rest of it. Every process of a group calls this; rank 0 does all but the layers alone.

    Returns:
        The contents of report.json; nothing in ranks except 0.

    Raises:
        InputError: exit 2; also if this process differs from rank 0 in something that the output's bytes depend on.
        QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    dist, uploads = options.dist, None
    work = journal.work_folder(options.output, dist.node)
    if dist.is_main:
        if options.imatrix:
            required("refuse_imatrix", "--imatrix")(job)
        _warn_of_another_source(job)
        finished = journal.finished_report(options.output)
        if finished is not None:
            dist.broadcast_object(False)
            return _already_done(job, options, finished)
        if isinstance(plan_findings(job), NotChecked):  # this and what is missing is said before a folder is made
            _say_unchecked(options)
        if job.opened.remote:
            schedule(job.opened, parts_of_run(job)).window(options.window)  # for its error
        resolve_recipe(job.recipe, job.path)
        journal.refuse_strangers(options.output)
        uploads = publishing.uploads_of(options.destination, options.output)
    with interruptible(RESUME) as interrupt:
        check = dist.watch(interrupt)
        unfinished: bool = dist.broadcast_object(not (work / "moving").exists())
        if not unfinished and not dist.is_main:
            return {}
        if unfinished:
            verify_kernels(options.device, job.integers, dist)
            _refuse_different_ranks(job, options)
        with journal.locked(options.output, dist):
            if unfinished and dist.is_main:
                with contextlib.closing(uploads) if uploads else contextlib.nullcontext():
                    _make_output(job, options, work, check, uploads)
            elif unfinished:
                _quantize_share(job, options, work, check)
            publishing.open_up(uploads, options.destination)
            return journal.move_into_place(work, options.output) if dist.is_main else {}


def _already_done(job: Job, options: Options, finished: dict[str, Any]) -> dict[str, Any]:
    """The report of an output that this recipe and source made; with `with_data`, data files are added first."""
    output = options.output
    refuse_another(job, output, finished)
    removed = finished.get("published", {}).get("removed", ())
    shards = (name for name in finished["files"] if name.endswith(".safetensors") and name not in removed)
    if gone := [name for name in shards if not (output / name).is_file()]:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        raise OutputError(
            output,
            f"was finished before, and {gone[0]}{more} went missing since",
            "put back what is missing, or start over with --fresh",
        )
    if options.imatrix and not options.imatrix_file.exists():
        raise OutputError(
            output,
            "was finished before, without an importance matrix",
            f"quantize imatrix RECIPE --output {options.imatrix_file} writes it",
        )
    publishing.refuse_unpublished(finished, options.destination, output)
    if options.with_data:
        data = resolve_recipe(job.recipe, job.path).data
        if not set(data) <= set(finished["files"]):
            if finished.get("seal") != seal_of(finished):
                raise OutputError(
                    output, "its report.json was changed since the run wrote it", "nothing is added to it"
                )
            for name, file in data.items():
                copy_file(file, output / name)
            finished = write_record(output, add_files(output, finished, data))
    work = journal.work_folder(output)
    if work.exists():  # the run was killed while it removed its work folder
        with journal.locked(output):
            journal.remove(work)
    return finished | {"already_done": True}


def _say_unchecked(options: Options) -> None:
    """Say that nobody checks how servers read the output. Raises an InputError if it would be published on the way."""
    if options.destination:
        raise InputError(
            "--publish-as-you-go", NOT_CHECKED, "run without it, then `quantize publish --force REASON` publishes it"
        )
    print(NOT_CHECKED, file=sys.stderr)


def refuse_another(job: Job, output: Path, finished: dict[str, Any]) -> None:
    """Raise an OutputError if a finished output is that of another recipe or, if it is open, of another source."""
    remedy = "choose another --output, or start over with --fresh"
    if not is_made_by(finished, job.recipe, job.path):
        changed = _changes(output, job)
        raise OutputError(
            output, f"holds the finished output of another recipe{f' ({changed})' if changed else ''}", remedy
        )
    if job.source and not is_source(finished.get("source"), job.source, job.location):
        raise OutputError(output, f"holds the finished output of another source than {job.location}", remedy)


def _changes(output: Path, job: Job) -> str:
    """List the differences of a finished output's own recipe from this one; empty if its recipe cannot be read."""
    try:
        before = meaning(*read_recipe(str(output / RECIPE)))
    except InputError:
        return ""
    old, now = (
        settings | {name: yaml.safe_load(text) for name, text in texts.items()}
        for settings, texts in (before, meaning(job.recipe, job.path))
    )
    changes = [
        f"{key}: {journal.short_value(was)}, now {journal.short_value(value)}"
        for key, was, value in journal.differences(old, now)
    ]
    return ", ".join([*changes[:SHOWN], *([f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else [])])


def _warn_of_another_source(job: Job) -> None:
    """Say it if the recipe lies in a finished checkpoint that was made from another source, so that its run differs."""
    made = (journal.finished_report(job.path.parent) or {}).get("source")
    if isinstance(made, dict) and made.get("digest") and not is_source(made, job.opened, job.location):
        print(
            f"{job.path}: the checkpoint beside it was made from another source than {job.location}, so this will "
            "not give the same bytes",
            file=sys.stderr,
        )


def _refuse_different_ranks(job: Job, options: Options) -> None:
    """Compare settings, machine and source with rank 0's; a layer's bytes are compared when they are read."""
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
    for key, wanted, found in journal.differences(first, of_this_process):
        remedy = REMEDIES.get(key, "give all processes the same")
        if key == "machine.threads":
            remedy = f"set OMP_NUM_THREADS={wanted} for all"
        ours, theirs = journal.short_value(found), journal.short_value(wanted)
        raise InputError("", f"{dist.name} has {key} {ours}, but rank 0 has {theirs}", remedy)
    dist.barrier()  # so that a difference is known before anything is written


@dataclass(frozen=True)
class _Inputs:
    """The token sequences of a run.

    Attributes:
        data, tokens: the calibration samples, and their token ids (T,) int64.
        evaluation: the held-out set; None if the recipe has nothing measured.
        resolved: the recipe as it is published, with locks of what was read of datasets of the Hub.
    """

    data: CalibrationData
    tokens: Sequence[torch.Tensor]
    evaluation: HeldOut | None
    resolved: Resolved

    @property
    def texts(self) -> Sequence[Text]:
        """The held-out texts."""
        return self.evaluation.texts if self.evaluation else ()

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the calibration set, and of the held-out texts."""
        return sum(map(len, self.tokens)), sum(len(text.tokens) for text in self.texts)


def _quantize_share(job: Job, options: Options, work: Path, check: Callable[[], None]) -> None:
    """All that ranks except 0 do: their share of the layers."""
    dist = options.dist
    try:
        least_memory(options)
        placed, texts = dist.broadcast_object()
        context = Context(work, options.device, placed, check, dist, window=options.window)
        check_source(job, texts, context, ignore=options.ignore_source_check)
        job = choose_schemes(job, None, context, options.output) if job.allocation else job
        quantize_layers(job, None, None, context, texts, imatrix=options.imatrix)
    finally:
        if dist.node:
            journal.leave(options.output, dist.node)


def _make_output(job: Job, options: Options, work: Path, check: Callable[[], None], uploads: Uploads | None) -> None:
    """All that rank 0 does: make work/output, up to the mark that lets it be moved into place."""
    started, output, dist = time.monotonic(), work / "output", options.dist
    # Read the sets once, before anything slow: they may be edited during the run.
    inputs = _read_inputs(job, dist, work)
    resolved, remote = inputs.resolved, job.opened.remote
    copied = resolved.data if options.with_data else {}
    planned = planned_report(job, resolved, inputs.data, options.device)
    refuse_unreadable(job.opened)
    publishing.begin(uploads, options.destination, planned)
    lengths = [len(sequence) for sequence in inputs.tokens]
    placed, temporary = share_memory(job, lengths, [len(text.tokens) for text in inputs.texts], options)
    damaged = _open_work_folder(job, inputs, options, work, check, uploads.shards if uploads else ())
    files = (*side_files(job.opened.folder), *copied.values())
    needed = planned.plan.output_bytes + sum(file.stat().st_size for file in files) + temporary
    if uploads and options.destination:
        removed = job.plan.removed_bytes(dist.world_size) if options.destination.remove else 0
        needed -= max(removed, uploads.removed_bytes)
    itemsize = forward_dtype(options.device).itemsize
    needed += bytes_of_sums(job.facts, inputs.counts[0], itemsize) if options.imatrix else 0
    needed += schedule(job.opened, parts_of_run(job)).window(options.window) if remote else 0
    probe = probe_bytes(job.facts, lengths, itemsize) if job.allocation else 0
    publish = "give --remove-uploaded" if uploads else "give --publish-as-you-go OWNER/NAME --remove-uploaded"
    less = ["give a smaller --window"] * bool(remote) + [publish]
    journal.check_room(work, needed + probe, less)
    dist.broadcast_object((placed, inputs.texts))
    context = Context(work, options.device, placed, check, dist, window=options.window, uploads=uploads)
    check_source(job, inputs.texts, context, ignore=options.ignore_source_check)
    if job.allocation:
        job = choose_schemes(job, inputs.tokens, context, options.output)
        name = resolved.recipe.source.model
        plan, served = plan_figures(job.plan, job.facts), serving(job.plan, job.facts, job.opened, name)
        planned = planned.changed(plan=plan, serving=served)
        journal.check_room(work, needed, less)
    stop = job.recipe.verify.stop if job.recipe.verify and not options.ignore_stop else None
    measured = quantize_layers(
        job, inputs.data, inputs.tokens, context, inputs.texts, damaged=damaged, stop=stop, imatrix=options.imatrix
    )
    write_config_files(output, job.opened, job.plan, job.facts)
    for name, text in resolved.texts().items():
        write_text(text, output / name)
    for name, file in copied.items():
        copy_file(file, output / name)
    check()
    figures = inputs.evaluation.figures(measured, "the output") if inputs.evaluation and measured else None
    if remote and figures and not options.ignore_source_check:
        refuse_source(job, figures.perplexity.source, f"the {len(inputs.texts)} texts")
    report = run_report(planned, job, inputs.data, figures, started, context)
    published = publishing.published(report, options.destination, output)
    write_report(output, report.changed(published=published), resolved.texts())
    if options.imatrix:
        write_imatrix = required("write_imatrix", "--imatrix")
        print(write_imatrix(options.imatrix_file, work / IMATRIX, job, inputs.data), file=sys.stderr)
    publishing.finish(uploads, work, options.output, check)
    write_text("", work / "moving")


def refuse_library(job: Job, dist: ProcessGroup) -> None:
    """Raise an InputError if the recipe's engine cannot share its work among the processes."""
    if dist.is_distributed and job.recipe.experts.engine != "gram":
        raise InputError(
            f"{job.path}: experts.engine",
            f"{job.recipe.experts.engine} works in one process",
            "start quantize without torchrun, or choose gram",
        )


def _read_inputs(job: Job, dist: ProcessGroup, work: Path) -> _Inputs:
    """Read and tokenize all sets before anything slow, so that a fault in one is found now."""
    recipe, facts, trusted = job.recipe, job.facts, job.recipe.source.trusts_tokenizer
    refuse_library(job, dist)
    pins: dict[str, list[Pin]] = {}

    def read(name: str, target: str, title: str = "calibration", **chosen: Any) -> CalibrationData:
        """The samples of a set, chosen by arguments of `load_set`; the run keeps the set."""
        file = set_location(name, job.path)
        data = print_notes(load_set(file, job.opened.folder, trusted, run=work / "calibration", **chosen), title)
        pins[target] = pins_of(read_set(file), data)
        return data

    data = read(
        recipe.calibration_set,
        CALIBRATION,
        tokens=recipe.calibration_tokens,
        without=recipe.calibration_without,
        positions=facts.positions,
    )
    if recipe.verify and recipe.verify.coverage:
        check_floors(recipe.verify.coverage, [sample.category for sample in data.samples], str(job.path))
    gate = recipe.verify and recipe.verify.perplexity
    other = read(gate.data, HELD_OUT, "held out") if gate else None
    commit = job.opened.revision if COMMIT.fullmatch(job.opened.revision or "") else None
    resolved = resolve_recipe(recipe, job.path, pins, commit)
    published = partial(resolved.published, target=HELD_OUT)
    texts = held_out(other, job.opened, facts, trusted, published) if other else None
    if job.facts.probes:  # derived ones, for those who have the output alone
        resolved = replace(resolved, sets={**resolved.sets, FACTS: job.facts.as_yaml()})
    return _Inputs(data, token_tensors(data, facts.vocab_size), texts, resolved)


def share_memory(job: Job, lengths: Sequence[int], texts: Sequence[int], options: Options) -> tuple[Placement, int]:
    """The places of what each process works on; and the bytes of temporary files.

    Args:
        lengths, texts: tokens of each calibration sequence, and of each held-out text.

    Raises:
        InputError: the device's memory is too little.
    """
    dist, text_rows = options.dist, sum(texts)
    memory, placed, in_files = place_activations(job, max([*lengths, *texts]), sum(lengths), text_rows, options)
    if dist.is_distributed and memory.units < dist.world_size:
        batches = f"{memory.units} expert batch{'es' if memory.units > 1 else ''} of {memory.unit} experts"
        print(f"{batches} for {dist.world_size} processes: some will be idle", file=sys.stderr)
    on_cards = len(job.recipe.as_served) * held_out_bytes(job.facts, text_rows, torch.bfloat16.itemsize)
    as_stored = held_out_bytes(job.facts, text_rows, forward_dtype(options.device).itemsize)
    return placed, as_stored * (2 if job.plan.cached else 1) + on_cards + in_files


def place_activations(
    job: Job, longest: int, tokens: int, held_out: int, options: Options
) -> tuple[DeviceMemory, Placement, int]:
    """The device's memory; the places of what a process works on; and bytes of calibration states in files.

    Args:
        longest: tokens of the longest sequence of all.
        tokens, held_out: of the calibration samples, and of the held-out texts that may be kept on the device.
    """
    dist, accelerator, facts = options.dist, is_accelerator(options.device), job.facts
    itemsize, machines = forward_dtype(options.device).itemsize, len(set(dist.nodes))
    limit, free = least_memory(options)
    # Only with "auto" may they be kept on the device.
    on_device, texts = (tokens, held_out) if options.states == "auto" else (0, 0)
    memory = device_memory(job.plan, facts, longest, accelerator, limit, on_device, dist.world_size, texts)
    shared = {"free": free, "processes": dist.world_size, "machines": machines}
    inputs, states, in_files = placement(facts, memory, tokens, itemsize, states=options.states, **shared)
    residents = Residents(memory.resident, memory.unit, memory.smallest)
    placed = Placement(residents, inputs, states, texts_on_device=memory.texts, prefetch=memory.early)
    return memory, placed, in_files


def least_memory(options: Options) -> tuple[int, int]:
    """Bytes that each process may use on its device, and bytes that are free in each machine's memory."""
    limit = options.device_memory or device_limit(options.device, options.dist.local_world_size)
    limits, frees = zip(*options.dist.all_gather_object((limit, available())), strict=True)
    return min(limits), min(frees)


def _open_work_folder(
    job: Job, inputs: _Inputs, options: Options, work: Path, check: Callable[[], None], uploaded: Container[str]
) -> list[int]:
    """Begin or resume in the work folder, and say so on standard error; the layers whose shards must be made again.

    What the run was begun with must be the same, and the texts that its finished layers were measured on; but it may
    resume without any.
    """
    output = options.output
    journal.refuse_changes(work, deciding(job, inputs.data, options.device), output)
    journal.note_command(work, options.command)
    entries = journal.done_layers(work, job.facts.num_layers)
    print(_opening_line(job, options, inputs, len(entries)), file=sys.stderr, flush=True)
    if inputs.evaluation:
        if entries and not (work / journal.HELD_OUT).exists():
            raise OutputError(
                output,
                "its finished layers were measured on no held-out set",
                "leave verify.perplexity out as before, or start over with --fresh",
            )
        as_served = {"as_served": job.recipe.as_served} if job.recipe.as_served else {}
        measured = {"held_out": inputs.evaluation.identity} | as_served
        journal.refuse_changes(work, measured, output, journal.HELD_OUT)
    journal.remove_cut_files(work)
    damaged = _find_damage(work, entries, output, check, uploaded)
    if options.paranoid:
        check_hashes(job.opened, work, output, check)
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    sync_folder(work)
    return damaged


def _find_damage(
    work: Path, entries: Sequence[dict[str, Any]], output: Path, check: Callable[[], None], uploaded: Container[str]
) -> list[int]:
    """The finished layers of an earlier call whose shards are no longer as they were written; each is named."""
    for passthrough in work.glob("passthrough-*.json"):
        if journal.damaged_shards(work, [json.loads(passthrough.read_text())], uploaded=uploaded):
            passthrough.unlink()  # its shard is written at the beginning, so it will be written again
    if not entries:
        return []
    with progress("checking", len(entries), unit="shard", check=check) as step:
        damaged = journal.damaged_shards(work, entries, step, uploaded)
    for layer, problem in damaged.items():
        print(f"{output}: layer {layer}: {problem}; it is made again", file=sys.stderr)
    return list(damaged)


def _opening_line(job: Job, options: Options, inputs: _Inputs, done: int) -> str:
    """The line with which a run begins: the source's published name, its size, output, device, tokens, layers done.

    It gives no time: the rates of `plan` are not this machine's. After the first layer the progress has a measured one.
    """
    tokens, held_out = inputs.counts
    layers, dense, threads = job.facts.num_layers, len(job.facts.dense), torch.get_num_threads()
    place = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    if options.device.type != "cpu":
        place = f"{options.device} ({torch.cuda.get_device_name(options.device)})"
    if options.dist.is_distributed:
        place += f", one of {options.dist.world_size} processes"
    source = sum(action.spec.bytes for action in job.plan.actions)
    routed = f"{layers - dense} of {layers} layers" if dense else f"{layers} layer{'s' if layers > 1 else ''}"
    texts = f" and {held_out:,} held-out" if held_out else ""
    resuming = f"; resuming after layer {done} of {layers}" if done else ""
    return (
        f"{inputs.resolved.recipe.source.model} ({size(source)}, {routed} × {job.facts.num_experts} experts) → "
        f"{short_path(options.output)} on {place}; {tokens:,} calibration{texts} tokens{resuming}"
    )


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
