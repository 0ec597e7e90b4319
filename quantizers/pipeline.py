"""The loop: layer by layer observe, solve, stitch, propagate, journal; then assemble, prove, move.

Nothing in the output folder looks finished before it is: everything is made under DIR/.quantize/ and
moved into place by renames at the very end. Statistics are forced (every expert sees every token),
states are natural (the next layer sees what the quantized layer really puts out).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from stitch.assemble import layer_tensors, write_shard
from stitch.quant_config import output_config

from . import journal
from .atomic import sync_folder, write_json, write_text
from .calibration import CalibrationData, load_samples
from .checkpoint import CONFIG, INDEX, Checkpoint, side_files
from .errors import OutputError, QuantizeError
from .interrupts import interruptible
from .layers import LayeredModel
from .plan import index_json, summary
from .progress import progress
from .proof import prove
from .recipe import set_location
from .session import Job, fingerprint, forward_dtype
from .solve_layer import LayerStores, install, solve_layer
from .states import Rows
from .statistics import route_counts
from .texts import token_tensors


@dataclass(frozen=True)
class Options:
    """Where and how a run works; nothing here decides what a recipe means.

    Attributes:
        output: the folder to write.
        device: where layers are computed.
        chunk: experts solved at a time; None for as many as fit.
    """

    output: Path
    device: torch.device
    chunk: int | None = None


def run(job: Job, options: Options) -> dict[str, Any]:
    """Do the whole job, or what is left of it.

    Returns:
        The report, as report.json holds it.

    Raises:
        InputError: exit 2. QuantizeError: exit 1. Interrupted: 130 or 143.
    """
    finished = finished_report(options.output)
    if finished is not None:
        settings = finished.get("settings")
        if not isinstance(settings, dict) or settings.get("hash") != job.recipe.digest():
            raise OutputError(
                f"{options.output}: holds the finished output of another recipe; choose another --output, or --fresh"
            )
        return finished | {"already_done": True}
    refuse_strangers(options.output)
    with (
        journal.locked(options.output),
        interruptible("give the same command again to go on") as check,
    ):
        work = journal.work_folder(options.output)
        if not (work / "moving").exists():
            _work(job, options, work, check)
        return _move(work, options.output)


def finished_report(output: Path) -> dict[str, Any] | None:
    """The report of a finished output, None where there is none."""
    if journal.work_folder(output).exists() or not (output / CONFIG).is_file():
        return None
    try:
        report: dict[str, Any] = json.loads((output / "report.json").read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) else {}


def refuse_strangers(output: Path) -> None:
    """Refuse a folder that holds something which is not ours.

    Raises:
        OutputError: the path is a file, or a folder with other files in it.
    """
    existing = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise OutputError(f"{existing}: is a file; give a new or empty folder as --output")
    if output.is_dir() and not journal.work_folder(output).exists() and any(output.iterdir()):
        raise OutputError(f"{output}: is not empty and holds no run of this program; give a new or empty folder")


def _work(job: Job, options: Options, work: Path, check: Callable[[], None]) -> None:
    started = time.monotonic()
    source = job.source
    assert source is not None
    data = load_samples(
        set_location(job.recipe.calibration, job.path),
        str(source.folder),
        trust_remote_code=job.recipe.source.trust_remote_code,
    )
    tokens = token_tensors(data, job.sizes["vocabulary"])
    chunk = options.chunk or job.sizes["experts"]
    journal.refuse_changes(work, run_fingerprint(job, source, data, options.device, chunk), options.output)
    for folder in ("layers", "output"):
        (work / folder).mkdir(exist_ok=True)
    _check_disk(job, work, sum(len(t) for t in tokens))
    quantize_layers(job, source, data, tokens, work, options.device, chunk, check)
    assemble(job, source, work / "output")
    check()
    write_report(job, options.device, source, data, work, started, check)


def run_fingerprint(
    job: Job, source: Checkpoint, data: CalibrationData, device: torch.device, chunk: int
) -> dict[str, Any]:
    """Every setting that decides bytes; gates and logging do not."""
    settings = job.recipe.settings()
    files = sorted({info.file for info in source.tensors.values()})
    return {
        "experts": settings["experts"],
        "source": {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files},
        "source_config": job.config,
        "calibration": data.digest,
        "machine": fingerprint(device) | ({"chunk": chunk} if device.type != "cpu" else {}),
    }


def _check_disk(job: Job, work: Path, tokens: int) -> None:
    numbers = summary(job.plan, job.sizes)
    written = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    states = 4 * tokens * (3 * job.sizes["hidden"] + 2 * job.sizes["chosen"])
    needed = int(str(numbers["output_bytes"])) + states - written
    free = shutil.disk_usage(work).free
    if needed > free:
        raise QuantizeError(
            f"{work.parent}: the output and its hidden states need {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are "
            "free; make room or choose another --output"
        )


def quantize_layers(
    job: Job,
    source: Checkpoint,
    data: CalibrationData,
    tokens: list[torch.Tensor],
    work: Path,
    device: torch.device,
    chunk: int,
    check: Callable[[], None] = lambda: None,
    compensate_router: bool = True,
) -> None:
    """The loop over decoder layers: one shard and one journal entry each, under `work`.

    Args:
        data, tokens: the calibration samples, and their token numbers (T,) int64.
        work: holds `layers/` and `output/`; layers that have a journal entry there are not done again.
        chunk: experts solved at a time.
        check: called between steps; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).
    """
    layers, hidden, experts = job.sizes["layers"], job.sizes["hidden"], job.sizes["experts"]
    done = len(journal.done_layers(work, layers))
    if done == layers:
        return
    dtype = forward_dtype(device)
    model = LayeredModel(source, job.facts, job.sizes, device, dtype)
    model.head()  # only read: a NaN in it would otherwise be found after the last layer
    lengths = [len(t) for t in tokens]
    states = Rows(work / f"states-{done:05d}.bin", lengths, hidden, dtype)
    if done == 0:
        table = model.embedding()
        for i, sequence in enumerate(tokens):
            states[i] = table[sequence.to(device)]
        del table
    stores = LayerStores(
        Rows(work / "x.bin", lengths, hidden, dtype),
        Rows(work / "chosen.bin", lengths, job.sizes["chosen"], torch.int32),
        Rows(work / "weight.bin", lengths, job.sizes["chosen"], torch.float32),
    )
    names = sorted({sample.category for sample in data.samples})
    with progress("quantizing", layers, done, "layer") as step:
        for number in range(done, layers):
            check()
            began = time.monotonic()
            with model.layer(number) as layer:
                materialised = time.monotonic()
                solved, seconds = solve_layer(
                    model, layer, number, states, stores, job.recipe.experts, chunk, check, compensate_router
                )
                solved_at = time.monotonic()
                shard = job.plan.shard_file(number)
                digest = write_shard(layer_tensors(job.plan, number, source, solved), work / "output" / shard)
                written = time.monotonic()
                install(model, layer, solved)
                following = Rows(work / f"states-{number + 1:05d}.bin", lengths, hidden, dtype)
                for i in range(len(states)):
                    following[i] = model.run(layer, states[i])[0]
                    check()
            if not all(bool(torch.isfinite(rows).all()) for rows in following):
                raise QuantizeError(
                    f"layer {number}: its output is not finite and would spoil the layers after it; the run stops here"
                )
            following.flush()
            counts = np.zeros((len(names), experts), dtype=np.int64)
            for i, sample in enumerate(data.samples):
                counts[names.index(sample.category)] += route_counts(stores.chosen[i].long(), experts).numpy()
            seconds |= {
                "materialise": materialised - began,
                "write": written - solved_at,
                "propagate": time.monotonic() - written,
            }
            entry = {
                "layer": number,
                "shard": shard,
                "sha256": digest,
                "seconds": seconds,
                "error": solved.error,
                "fallbacks": solved.fallbacks,
                "routed": counts.tolist(),
                "peak_memory_bytes": peak_memory(device),
            }
            write_json(journal.layer_file(work, number), entry)
            states.path.unlink()
            states = following
            step(f"{sum(seconds.values()):.1f} s, rounding error {solved.error.get('down_rounding', float('nan')):.4f}")
    for rows in (states, stores.x, stores.chosen, stores.weight):
        rows.path.unlink()


def assemble(job: Job, source: Checkpoint, folder: Path) -> None:
    """What lies outside the layers: the last shard, index, config, recipe, and the source's side files."""
    write_shard(layer_tensors(job.plan, None, source, None), folder / job.plan.shard_file(None))
    for file in side_files(source.folder):
        shutil.copyfile(file, folder / file.name)
    recipe = yaml.safe_dump(job.recipe.settings(), sort_keys=False, allow_unicode=True)
    write_text(recipe, folder / "recipe.yaml")
    write_text(index_json(job.plan), folder / INDEX)
    config = output_config(job.config, job.recipe.experts, job.block)
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
    """Audit and evaluate what was assembled, and write report.json and the card."""
    from eval.card import card

    layers = journal.done_layers(work, job.sizes["layers"])
    report = prove(job, device, source, data, layers, work, check)
    earlier = sum(sum(entry["seconds"].values()) for entry in layers)
    report["seconds"] = {"this_process": time.monotonic() - started, "layers": earlier}
    report["peak_memory_bytes"] = max([peak_memory(device), *(entry["peak_memory_bytes"] for entry in layers)])
    folder = work / "output"
    report["files"] = sorted([*(path.name for path in folder.iterdir()), "README.md"])
    write_json(folder / "report.json", report)
    write_text(card(report), folder / "README.md")
    write_text("", work / "moving")


def _move(work: Path, output: Path) -> dict[str, Any]:
    """Move the finished files into place: shards first, config.json last. Goes on where it was cut off."""
    folder = work / "output"
    last = ["report.json", "README.md", INDEX, CONFIG]
    names = sorted(path.name for path in folder.iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    rest = [name for name in names if name not in shards and name not in last]
    for name in [*shards, *rest, *(name for name in last if name in names)]:
        os.replace(folder / name, output / name)
    sync_folder(output)
    report: dict[str, Any] = json.loads((output / "report.json").read_text())
    shutil.rmtree(work)
    return report


def peak_memory(device: torch.device) -> int:
    """Largest resident memory of this process so far, in bytes; the device's on an accelerator."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
