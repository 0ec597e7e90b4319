"""A run from start to finish: the loop over layers, then assemble, read everything once more, move into place.

An unfinished output never looks finished: everything is written under DIR/.quantize/ and renamed into
place at the very end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval.coverage.gates import check_floors
from eval.fidelity.held_out import HeldOut, held_out
from eval.fidelity.metrics import Text
from quantizers.budget.choice import choose_schemes
from quantizers.budget.measure import probe_bytes
from quantizers.calibration.load_set import load_set
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.source_identity import check_hashes, source_stats
from quantizers.device.devices import device_limit, fingerprint, forward_dtype, is_accelerator
from quantizers.distributed.process_group import RESUME, ProcessGroup
from quantizers.layers.context import Context
from quantizers.output import journal
from quantizers.output.fingerprint import refuse_changes
from quantizers.output.folder import check_room, finished_report, move_into_place, refuse_strangers
from quantizers.output.manifest import text_sha256
from quantizers.planning.device_memory import (
    Place,
    Residents,
    device_memory,
    held_out_bytes,
    placement,
)
from quantizers.planning.job import Job
from quantizers.planning.units import work_units
from quantizers.recipe.portable import Resolved, facts_copy, resolve_recipe
from quantizers.recipe.read import set_location
from quantizers.solve.kernel_check import verify_kernels
from quantizers.system.errors import InputError
from quantizers.system.files import copy_file, sync_folder, write_text
from quantizers.system.host_memory import available
from quantizers.system.interrupts import interruptible
from stitch.write.config_files import write_config_files

from .disk import output_bytes
from .finished import already_done
from .opening import opening_line
from .options import Options
from .quantize import quantize_layers
from .rank_consistency import agree
from .report import run_report
from .report_files import write_report
from .unfinished import find_damage, refuse_other_texts

METHOD = 11  # increased whenever the same settings would give different bytes


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or what is left of it. Of several processes rank 0 calls this, and the others `assist`.

    Returns:
        The contents of report.json.

    Raises:
        InputError: exit 2. QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    dist, finished = options.dist, finished_report(options.output)
    if finished is not None:
        dist.broadcast_object(False)
        return already_done(job, options, finished)
    # Read the sets once, before anything slow: they may be edited during the run.
    resolved = resolve_recipe(job.recipe, job.path)
    refuse_strangers(options.output)
    with interruptible(RESUME) as interrupt:
        check = dist.watch(interrupt)
        work = journal.work_folder(options.output)
        moving = (work / "moving").exists()
        dist.broadcast_object(not moving)
        if not moving:
            _verify_kernels(job, options)
            agree(job, options)
        with journal.locked(options.output, dist):
            if not moving:
                _work(job, resolved, options, work, check)
            return move_into_place(work, options.output)


def assist(job: Job, options: Options) -> None:
    """What all ranks except 0 do: their share of the layers. Rank 0 does the rest.

    Raises:
        InputError: this process differs from rank 0 in something that the output's bytes depend on.
        QuantizeError, Interrupted: as `run` does.
    """
    dist = options.dist
    with interruptible(RESUME) as interrupt:
        check = dist.watch(interrupt)
        if not dist.broadcast_object():
            return
        _verify_kernels(job, options)
        agree(job, options)
        work = journal.work_folder(options.output, dist.node)
        with journal.locked(options.output, dist):
            try:
                limit, free = _memory(options)
                dist.all_gather_object((limit, free))
                message: _Shared = dist.broadcast_object()
                context = message.context(work, options.device, check, dist)
                job = _with_schemes(job, None, context, options.output)
                quantize_layers(job, None, None, context, message.texts)
            finally:
                if dist.node:
                    journal.leave(options.output, dist.node)


def _verify_kernels(job: Job, options: Options) -> None:
    """Compare the GPU's kernels with their eager twins, for all schemes that the run may use."""
    schemes = job.allocation.candidates if job.allocation else job.plan.schemes
    verify_kernels(options.device, {(scheme.bits, scheme.group_size) for scheme in schemes}, options.dist)


@dataclass(frozen=True)
class _Shared:
    """What rank 0 decides for all, and tells them.

    Attributes:
        residents, inputs, states, texts_on_device, prefetch_to_device: see `Context`.
        texts: the held-out texts; empty for none.
    """

    residents: dict[str, int]
    inputs: Place
    states: Place
    texts_on_device: bool
    prefetch_to_device: bool
    texts: Sequence[Text]

    def context(self, work: Path, device: torch.device, check: Callable[[], None], dist: ProcessGroup) -> Context:
        """The same for a process."""
        residents = Residents(**self.residents)
        places = self.inputs, self.states, self.texts_on_device, self.prefetch_to_device
        return Context(work, device, residents, check, dist, *places)


def _memory(options: Options) -> tuple[int, int]:
    """Bytes that this process may use on its device, and bytes that are free in its machine's memory."""
    limit = options.device_memory or device_limit(options.device, options.dist.local_world_size)
    return limit, available()


def _work(job: Job, resolved: Resolved, options: Options, work: Path, check: Callable[[], None]) -> None:
    started = time.monotonic()
    source, device, dist = job.opened, options.device, options.dist
    if dist.is_distributed and job.recipe.experts.engine != "gram":
        raise InputError(
            f"{job.path}: experts.engine: {job.recipe.experts.engine} works in one process; start quantize without "
            "torchrun, or choose gram"
        )
    data = _samples(job, job.recipe.calibration_set, job.recipe.calibration_tokens)
    if data.drawn and data.drawn.tokens < data.drawn.asked:
        print(data.notes[-1], file=sys.stderr)  # what draw.py noted
    if job.recipe.verify and job.recipe.verify.coverage:
        check_floors(job.recipe.verify.coverage, [sample.category for sample in data.samples], str(job.path))
    tokens = token_tensors(data, job.sizes["vocabulary"])
    held = load_held_out(job)  # before anything slow: a faulty set fails now
    itemsize, rows = forward_dtype(device).itemsize, sum(len(t) for t in tokens)
    limits, frees = zip(*dist.all_gather_object(_memory(options)), strict=True)
    texts = held.texts if held else []
    text_rows = sum(len(text.tokens) for text in texts)
    there = (rows, text_rows) if options.states == "auto" else (0, 0)  # what may lie on the device
    memory = device_memory(
        job.plan,
        job.sizes,
        data.lengths[-1],
        is_accelerator(device),
        min(limits),
        there[0],
        dist.world_size,
        held_out=there[1],
    )
    refuse_changes(work, run_fingerprint(job, data, device), options.output)
    layers = job.sizes["layers"]
    journal.note_command(work, options.command, layers)
    done = len(journal.done_layers(work, layers))
    said = opening_line(job, options, resolved.recipe.source.model, (rows, text_rows), done)
    print(said, file=sys.stderr, flush=True)
    if held:
        refuse_other_texts(work, job.sizes["layers"], held, options.output)
    journal.remove_cut_files(work)
    damaged = find_damage(work, job.sizes["layers"], options.output, check)
    if options.paranoid:
        check_hashes(source, work, options.output, check)
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    sync_folder(work)
    if dist.is_distributed and memory.units < dist.world_size:
        units = f"{memory.units} unit{'s' if memory.units > 1 else ''} of {memory.unit} experts"
        print(f"{units} for {dist.world_size} processes: some have none to solve", file=sys.stderr)
    inputs, states, in_files = placement(
        job.sizes,
        memory,
        rows,
        itemsize,
        states=options.states,
        free=min(frees),
        processes=dist.world_size,
        machines=len(set(dist.nodes)),
    )
    residents = Residents(memory.resident, memory.unit, memory.smallest)
    shared = _Shared(residents.as_dict(), inputs, states, memory.texts, memory.early, texts)
    context = shared.context(work, device, check, dist)
    needed = output_bytes(job, resolved.data.values() if options.with_data else ())
    needed += held_out_bytes(job.sizes, text_rows, itemsize) + in_files
    probe = probe_bytes(job.sizes, [len(t) for t in tokens], itemsize) if job.allocation else 0
    check_room(work, needed + probe)
    dist.broadcast_object(shared)
    job = _with_schemes(job, tokens, context, options.output)
    check_room(work, needed)
    verify = job.recipe.verify
    stop = verify.stop if verify and not options.ignore_stop else None
    measured = quantize_layers(job, data, tokens, context, texts, damaged=damaged, stop=stop)
    assemble(job, work / "output")
    add_recipe(resolved, work / "output", options.with_data)
    check()
    figures = held.figures(measured, "the output") if held and measured else None
    report = run_report(job, resolved, data, figures, started, context)
    write_report(work / "output", report, resolved.texts())
    write_text("", work / "moving")


def _with_schemes(job: Job, tokens: Sequence[torch.Tensor] | None, context: Context, output: Path) -> Job:
    """The job with the schemes that are chosen for its budget, if it has one.

    Args:
        tokens: of the calibration samples; None in all ranks except 0.
    """
    return choose_schemes(job, tokens, context, output) if job.allocation else job


def _samples(job: Job, name: str, tokens: int | None = None) -> CalibrationData:
    """The samples of a set that the recipe names, or `tokens` tokens of them."""
    return load_set(set_location(name, job.path), job.opened.folder, job.recipe.source.trusts_tokenizer, tokens)


def load_held_out(job: Job) -> HeldOut | None:
    """The texts on which the recipe has perplexity and KL measured; None if it asks for neither."""
    gate = job.recipe.verify and job.recipe.verify.perplexity
    if not gate:
        return None
    data = _samples(job, gate.data)
    return held_out(data, job.opened, job.sizes["vocabulary"], job.recipe.source.trusts_tokenizer)


def run_fingerprint(job: Job, data: CalibrationData, device: torch.device) -> dict[str, Any]:
    """Every setting that the output's bytes depend on; gates and logging are not among them."""
    facts = {name: text_sha256(text) for name, text in facts_copy(job.own).items()}
    drawn = {"calibration.tokens": data.drawn.asked} if data.drawn else {}
    return (
        facts
        | drawn
        | {
            "method": METHOD,
            "experts": job.recipe.settings()["experts"],
            "source": source_stats(job.opened),
            "source_config": job.config,
            "calibration": data.digest,
            "machine": fingerprint(device),
            "units": work_units(is_accelerator(device), job.sizes),
        }
    )


def assemble(job: Job, folder: Path) -> None:
    """Write what lies beside the shards: index, config, and the source's side files."""
    write_config_files(folder, job.opened, job.plan, job.facts)


def add_recipe(resolved: Resolved, folder: Path, with_data: bool) -> None:
    """Write the recipe and its sets beside the checkpoint; with `with_data`, their local data files too."""
    for name, text in resolved.texts().items():
        write_text(text, folder / name)
    if with_data:
        for name, file in resolved.data.items():
            copy_file(file, folder / name)
