"""A run from start to finish: the loop over layers, then assemble, prove, move into place.

An unfinished output never looks finished: everything is written under DIR/.quantize/ and renamed into
place at the very end.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from eval.coverage.gates import check_floors
from eval.fidelity.held_out import cut, positions
from quantizers.budget.choice import choose_schemes
from quantizers.budget.measure import branch_rows
from quantizers.budget.measurements import read_measurements
from quantizers.calibration.data import CalibrationData
from quantizers.calibration.samples import samples
from quantizers.calibration.texts import token_tensors
from quantizers.checkpoint.reader import CONFIG, INDEX, side_files
from quantizers.checkpoint.source_files import check_hashes, source_stats
from quantizers.device.devices import device_limit, fingerprint, forward_dtype
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.output.folder import check_room, finished_report, move_into_place, refuse_strangers
from quantizers.output.record import describe_files
from quantizers.plan.job import Job
from quantizers.plan.plan import index_json
from quantizers.plan.solve_memory import device_memory
from quantizers.recipe.portable import Resolved, resolve_recipe
from quantizers.recipe.schema import set_location
from quantizers.recipe.scheme import Scheme
from quantizers.system.atomic import copy_file, sync_folder, write_text
from quantizers.system.errors import InputError
from quantizers.system.interrupts import interruptible
from quantizers.system.own_files import CARD, PAGE
from quantizers.system.progress import peak_memory
from quantizers.team.rendezvous import RESUME
from stitch.write.config import output_config
from stitch.write.digests import ShardDigest
from stitch.write.shard import layer_tensors, write_shard

from .card import write_with_card
from .disk import disk_needed, handed_over
from .finished import already_done
from .layer_loop import assist_layers, quantize_layers
from .options import Options
from .proof import fidelity, prove

METHOD = 3  # increased whenever the same settings would give different bytes


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or what is left of it. With several ranks, rank 0 calls this and the others `assist`.

    Returns:
        The contents of report.json.

    Raises:
        InputError: exit 2. QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    finished = finished_report(options.output)
    if finished is not None:
        options.ranks.broadcast("run", None)
        return already_done(job, options, finished)
    # Read the sets once, before anything slow: they may be edited during the run.
    resolved = resolve_recipe(job.recipe, job.path)
    refuse_strangers(options.output)
    with (
        journal.locked(options.output, options.ranks),
        interruptible(RESUME) as check,
    ):
        work = journal.work_folder(options.output)
        if (work / "moving").exists():
            options.ranks.broadcast("run", None)
        else:
            _work(job, resolved, options, work, check)
        return move_into_place(work, options.output)


def assist(job: Job, options: Options) -> None:
    """What all ranks except 0 do: their share of the layers, and of perplexity and KL. Rank 0 does the rest.

    Raises:
        InputError: this process differs from rank 0 in something that the output's bytes depend on.
        QuantizeError, Interrupted: as `run` does.
    """
    with interruptible(RESUME) as check:
        work = journal.work_folder(options.output)
        ranks = options.ranks.at(work / "ranks", check)
        message = ranks.receive("run")
        if message is None:
            return
        job = replace(job, plan=job.plan.with_schemes([Scheme(**scheme) for scheme in message["schemes"]]))
        for key, first, own in journal.differences(message["machine"], fingerprint(options.device)):
            raise InputError(
                f"process {ranks.rank} has another {key} ({own}) than process 0 ({first}); make them equal"
            )
        with journal.locked(options.output, ranks):
            context = Context(work, options.device, message["chunk"], check, ranks)
            assist_layers(job, context)
            if job.recipe.verify and job.recipe.verify.perplexity:
                fidelity(job, job.recipe.verify.perplexity, context)


def _work(job: Job, resolved: Resolved, options: Options, work: Path, check: Callable[[], None]) -> None:
    started = time.monotonic()
    source, device = job.opened, options.device
    if options.ranks.several and job.recipe.experts.engine != "gram":
        raise InputError(
            f"{job.path}: experts.engine: {job.recipe.experts.engine} works in one process; start quantize without "
            "torchrun, or choose gram"
        )
    data = _samples(job, job.recipe.calibration)
    if job.recipe.verify and job.recipe.verify.coverage:
        check_floors(job.recipe.verify.coverage, [sample.category for sample in data.samples], str(job.path))
    tokens = token_tensors(data, job.sizes["vocabulary"])
    itemsize = forward_dtype(device).itemsize
    limit = options.device_memory or device_limit(device, options.ranks.count)
    memory = device_memory(job.plan, job.sizes, data.lengths[-1], itemsize, limit)
    journal.refuse_changes(work, run_fingerprint(job, data, device, memory.chunk), options.output)
    journal.refuse_damaged_shards(work, job.sizes["layers"], options.output, options.paranoid)
    journal.remove_cut_files(work)
    if options.paranoid:
        check_hashes(source, work, options.output, check)
    shutil.rmtree(work / "ranks", ignore_errors=True)  # what killed processes were about to pass to each other
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    sync_folder(work)
    rows, held_out = sum(len(t) for t in tokens), held_out_tokens(job)
    branches = branch_rows([len(t) for t in tokens], job.sizes["layers"]) if job.allocation else 0
    ranks, between = options.ranks.at(work / "ranks", check), 0
    if ranks.several:
        between = handed_over(job)
        if device.type != "cpu" and (chunks := math.ceil(job.sizes["experts"] / memory.chunk)) < ranks.count:
            print(
                f"{chunks} chunks of experts for {ranks.count} processes, so some have none to solve; "
                "a smaller --device-memory makes more, from the beginning of a run on",
                file=sys.stderr,
            )
    context = Context(work, device, memory.chunk, check, ranks)
    copied = resolved.data.values() if options.with_data else ()
    check_room(work, disk_needed(job, rows + branches, held_out, itemsize, copied) + between)
    if job.allocation:
        job = choose_schemes(job, tokens, context, options.output)
        check_room(work, disk_needed(job, rows, held_out, itemsize, copied) + between)
    schemes = [asdict(scheme) for scheme in job.plan.schemes]
    ranks.broadcast("run", {"machine": fingerprint(device), "schemes": schemes, "chunk": memory.chunk})
    quantize_layers(job, data, tokens, context)
    last = assemble(job, work / "output")
    add_recipe(resolved, work / "output", options.with_data)
    check()
    write_report(job, resolved, data, last, started, context)


def _samples(job: Job, name: str) -> CalibrationData:
    """The samples of a calibration set that the recipe names."""
    return samples(set_location(name, job.path), job.opened.folder, job.recipe.source.trust_remote_code)


def held_out_tokens(job: Job) -> int:
    """Scored tokens of the held-out set. It is loaded this early so that a faulty set fails now, not after hours."""
    gate = job.recipe.verify and job.recipe.verify.perplexity
    if not gate:
        return 0
    data = _samples(job, gate.data)
    return sum(len(t) for t in cut(token_tensors(data, job.sizes["vocabulary"]), positions(job.config)))


def run_fingerprint(job: Job, data: CalibrationData, device: torch.device, chunk: int) -> dict[str, Any]:
    """Every setting that the output's bytes depend on; gates and logging are not among them."""
    return {
        "method": METHOD,
        "experts": job.recipe.settings()["experts"],
        "source": source_stats(job.opened),
        "source_config": job.config,
        "calibration": data.digest,
        "machine": fingerprint(device) | ({"chunk": chunk} if device.type != "cpu" else {}),
    }


def assemble(job: Job, folder: Path) -> ShardDigest:
    """Write what lies outside the layers: the last shard, index, config, and the source's side files.

    Returns:
        The digest of the last shard.
    """
    shards = {job.plan.shard_file(layer) for layer in range(job.plan.layers)}
    for path in folder.iterdir():  # left by an earlier attempt, which may have had other options
        if path.name not in shards:
            path.unlink()
    last = write_shard(layer_tensors(job.plan, None, job.opened, None), folder / job.plan.shard_file(None))
    for file in side_files(job.opened.folder):
        copy_file(file, folder / file.name)
    write_text(index_json(job.plan), folder / INDEX)
    config = output_config(job.config, job.plan.schemes, job.block)
    write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)
    return last


def add_recipe(resolved: Resolved, folder: Path, with_data: bool) -> None:
    """Write the recipe and its sets beside the checkpoint; with `with_data`, their local data files too."""
    for name, text in resolved.texts().items():
        write_text(text, folder / name)
    if with_data:
        for name, file in resolved.data.items():
            copy_file(file, folder / name)


def write_report(
    job: Job, resolved: Resolved, data: CalibrationData, last: ShardDigest, started: float, context: Context
) -> None:
    """Audit and evaluate the assembled files, and write report.json, the page and the card.

    Args:
        last: digest of the last shard, which is in no layer's journal entry.
        started: `time.monotonic()` when this process began.
    """
    from eval.report.card_pictures import draw

    from .card_facts import add_card_facts

    work = context.work
    layers = journal.done_layers(work, job.sizes["layers"])
    written = {entry["shard"]: entry["digest"] for entry in layers} | {job.plan.shard_file(None): last}
    report = prove(job, resolved, data, layers, written, context)
    earlier = sum(sum(entry["seconds"].values()) for entry in layers)
    report["seconds"] = {"this_process": time.monotonic() - started, "layers": earlier}
    if job.allocation:
        report["seconds"]["measuring"] = sum(
            entry["seconds"] for entry in read_measurements(work, job.sizes["layers"]) or ()
        )
    report["peak_memory_bytes"] = max([peak_memory(context.device), *(entry["peak_memory_bytes"] for entry in layers)])
    add_card_facts(report, job, data)
    folder = work / "output"
    draw(report, folder)
    write_with_card(folder, report | describe_files(folder, resolved.texts(), later=(CARD, PAGE)))
    write_text("", work / "moving")
