"""A run from beginning to end: the loop over layers; then assemble, prove, move.

Nothing in the output folder looks finished before it is: everything is made under DIR/.quantize/ and
moved into place by renames at the very end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from eval.coverage import check_floors
from stitch.assemble import layer_tensors, write_shard
from stitch.quant_config import output_config

from . import journal
from .atomic import copy_file, sync_folder, write_json, write_text
from .calibration import CalibrationData, load_samples
from .checkpoint import CONFIG, INDEX, Checkpoint, read_json, side_files
from .errors import OutputError
from .interrupts import interruptible
from .layer_loop import quantize_layers
from .measure_schemes import lane_rows, measured
from .memory import device_memory
from .output_folder import check_room, finished_report, move_into_place, refuse_strangers
from .plan import index_json, summary
from .progress import peak_memory
from .proof import prove
from .recipe import set_location
from .scheme_choice import decide
from .session import Job, device_limit, fingerprint, forward_dtype
from .source_files import check_hashes, source_stats
from .texts import token_tensors


@dataclass(frozen=True)
class Options:
    """Where and how a run works; nothing here decides what a recipe means.

    Attributes:
        output: the folder to write.
        device: where layers are computed.
        device_memory: bytes that may be used there, from which follows how many experts are solved at a
            time; None for what the device has.
        paranoid: keep the source's hashes, and compare them when the run goes on.
    """

    output: Path
    device: torch.device
    device_memory: int | None = None
    paranoid: bool = False


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or what is left of it.

    Returns:
        The report, as report.json holds it.

    Raises:
        InputError: exit 2. QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    finished = finished_report(options.output)
    if finished is not None:
        return _already_done(job, options.output, finished)
    refuse_strangers(options.output)
    with (
        journal.locked(options.output),
        interruptible("give the same command again to go on") as check,
    ):
        work = journal.work_folder(options.output)
        if not (work / "moving").exists():
            _work(job, options, work, check)
        return move_into_place(work, options.output)


def _already_done(job: Job, output: Path, finished: dict[str, Any]) -> dict[str, Any]:
    settings = finished.get("settings")
    if not isinstance(settings, dict) or settings.get("hash") != job.recipe.digest():
        raise OutputError(f"{output}: holds the finished output of another recipe; choose another --output, or --fresh")
    if journal.work_folder(output).exists():  # a run that was killed while it removed its own traces
        with journal.locked(output):
            journal.remove(journal.work_folder(output))
    return finished | {"already_done": True}


def _work(job: Job, options: Options, work: Path, check: Callable[[], None]) -> None:
    started = time.monotonic()
    source, device = job.source, options.device
    assert source is not None
    data = load_samples(
        set_location(job.recipe.calibration, job.path),
        str(source.folder),
        trust_remote_code=job.recipe.source.trust_remote_code,
    )
    if job.recipe.verify and job.recipe.verify.coverage:
        check_floors(job.recipe.verify.coverage, [sample.category for sample in data.samples], str(job.path))
    tokens = token_tensors(data, job.sizes["vocabulary"])
    itemsize = forward_dtype(device).itemsize
    limit = options.device_memory or device_limit(device)
    memory = device_memory(job.plan, job.sizes, data.sequence_length, itemsize, limit)
    journal.refuse_changes(work, run_fingerprint(job, source, data, device, memory.chunk), options.output)
    journal.remove_cut_files(work)
    if options.paranoid:
        check_hashes(source, work, options.output, check)
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    sync_folder(work)
    rows, held_out = sum(len(t) for t in tokens), held_out_tokens(job, source)
    lanes = lane_rows([len(t) for t in tokens], job.sizes["layers"]) if job.allocation else 0
    check_room(work, disk_needed(job, source, rows + lanes, held_out, itemsize))
    if job.allocation:
        job = decide(job, source, tokens, work, device, memory.chunk, options.output, check)
        check_room(work, disk_needed(job, source, rows, held_out, itemsize))
    quantize_layers(job, source, data, tokens, work, device, memory.chunk, check)
    assemble(job, source, work / "output")
    check()
    write_report(job, device, source, data, work, started, check)


def held_out_tokens(job: Job, source: Checkpoint) -> int:
    """Tokens of the held-out set, which is loaded so that what is wrong with it is said now and not after hours."""
    asked = job.recipe.verify and job.recipe.verify.perplexity
    if not asked:
        return 0
    data = load_samples(set_location(asked.data, job.path), str(source.folder))
    return sum(len(t) for t in token_tensors(data, job.sizes["vocabulary"]))


def disk_needed(job: Job, source: Checkpoint, tokens: int, held_out: int, itemsize: int) -> int:
    """Bytes of the output with its side files, and of the hidden states when they are most.

    While layers are solved, states lie there before and after the layer and at its experts; while source
    and output are measured, of each before and after.
    """
    output = int(str(summary(job.plan, job.sizes)["output_bytes"]))
    output += sum(file.stat().st_size for file in side_files(source.folder))
    row = itemsize * job.sizes["hidden"]
    return output + max(tokens * (3 * row + 8 * job.sizes["chosen"]), held_out * 4 * row)


def run_fingerprint(
    job: Job, source: Checkpoint, data: CalibrationData, device: torch.device, chunk: int
) -> dict[str, Any]:
    """Every setting that decides bytes; gates and logging do not."""
    return {
        "experts": job.recipe.settings()["experts"],
        "source": source_stats(source),
        "source_config": job.config,
        "calibration": data.digest,
        "machine": fingerprint(device) | ({"chunk": chunk} if device.type != "cpu" else {}),
    }


def assemble(job: Job, source: Checkpoint, folder: Path) -> None:
    """What lies outside the layers: the last shard, index, config, recipe, and the source's side files."""
    write_shard(layer_tensors(job.plan, None, source, None), folder / job.plan.shard_file(None))
    for file in side_files(source.folder):
        copy_file(file, folder / file.name)
    recipe = yaml.safe_dump(job.recipe.settings(), sort_keys=False, allow_unicode=True)
    write_text(recipe, folder / "recipe.yaml")
    write_text(index_json(job.plan), folder / INDEX)
    config = output_config(job.config, job.plan.schemes, job.block)
    write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)


def write_report(
    job: Job,
    device: torch.device,
    source: Checkpoint,
    data: CalibrationData,
    work: Path,
    started: float,
    check: Callable[[], None],
) -> None:
    """Audit and evaluate what was assembled, and write report.json, its page and the card."""
    from eval.card import card
    from eval.pictures import draw
    from eval.report_html import page

    from .card_facts import add_card_facts

    layers = journal.done_layers(work, job.sizes["layers"])
    report = prove(job, device, source, data, layers, work, check)
    earlier = sum(sum(entry["seconds"].values()) for entry in layers)
    report["seconds"] = {"this_process": time.monotonic() - started, "layers": earlier}
    if job.allocation:
        report["seconds"]["measuring"] = sum(entry["seconds"] for entry in measured(work, job.sizes["layers"]) or ())
    report["peak_memory_bytes"] = max([peak_memory(device), *(entry["peak_memory_bytes"] for entry in layers)])
    add_card_facts(report, job, source, data)
    folder = work / "output"
    draw(report, folder)
    # report.json is there already when an earlier part was cut between here and the move.
    report["files"] = sorted({path.name for path in folder.iterdir()} - {"report.json"} | {"README.md", "report.html"})
    write_json(folder / "report.json", report)
    write_text(page(read_json(folder / "report.json")), folder / "report.html")
    write_text(card(report), folder / "README.md")
    write_text("", work / "moving")
