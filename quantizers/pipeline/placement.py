"""Memory and disk of a run: where its activations are kept, and how much it writes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantizers.budget.measure import probe_bytes
from quantizers.checkpoint.reader import side_files
from quantizers.checkpoint.window import schedule
from quantizers.device.devices import device_limit, forward_dtype, is_accelerator
from quantizers.output.uploads import Uploads
from quantizers.planning.device_memory import (
    DeviceMemory,
    Placement,
    Residents,
    device_memory,
    held_out_bytes,
    placement,
)
from quantizers.planning.job import Job, parts_of_run
from quantizers.system.host_memory import available

from .inputs import Inputs
from .options import Options


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
    on_cards = len(job.as_served) * held_out_bytes(job.facts, text_rows, torch.bfloat16.itemsize)
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
    dist, facts = options.dist, job.facts
    accelerator = is_accelerator(options.device)
    itemsize, machines = forward_dtype(options.device).itemsize, len(set(dist.nodes))
    limit, free = shared_limits(options)
    # Only with "auto" may they be kept on the device.
    on_device, texts = (tokens, held_out) if options.states == "auto" else (0, 0)
    memory = device_memory(job.plan, facts, longest, accelerator, limit, on_device, dist.world_size, texts)
    shared = {"free": free, "processes": dist.world_size, "machines": machines}
    inputs, states, in_files = placement(facts, memory, tokens, itemsize, states=options.states, **shared)
    residents = Residents(memory.resident, memory.unit, memory.smallest)
    placed = Placement(residents, inputs, states, texts_on_device=memory.texts, prefetch=memory.early)
    return memory, placed, in_files


def shared_limits(options: Options) -> tuple[int, int]:
    """Bytes that each process may use on its device, and bytes that are free in each machine's memory."""
    limit = options.device_memory or device_limit(options.device, options.dist.local_world_size)
    limits, frees = zip(*options.dist.all_gather_object((limit, available())), strict=True)
    return min(limits), min(frees)


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes that a run has on the disk at a time.

    Attributes:
        layers: while the layers are quantized, and afterwards.
        probes: more than these, while the schemes of a budget are measured.
        remedies: what would need less.
    """

    layers: int
    probes: int
    remedies: Sequence[str]


def disk_needs(
    job: Job, inputs: Inputs, options: Options, output: int, temporary: int, uploads: Uploads | None
) -> DiskNeeds:
    """Bytes of the output, of files that are copied into it, of temporary files, and of the source's window.

    Args:
        output: bytes of the output's shards. temporary: bytes of activations in files, see `share_memory`.
    """
    itemsize = forward_dtype(options.device).itemsize
    remote = job.opened.remote
    observer = options.observer()
    copied = inputs.resolved.data.values() if options.with_data else ()
    needed = output + temporary + sum(file.stat().st_size for file in (*side_files(job.opened.folder), *copied))
    if uploads and options.destination:
        removed = job.plan.removed_bytes(options.dist.world_size) if options.destination.remove else 0
        needed -= max(removed, uploads.removed_bytes)
    if observer:
        needed += observer.disk_bytes(job.facts, inputs.counts[0], itemsize)
    if remote:
        needed += schedule(job.opened, parts_of_run(job)).window(options.window)
    probes = probe_bytes(job.facts, inputs.lengths, itemsize) if job.allocation else 0
    publish = "give --remove-uploaded" if uploads else "give --publish-as-you-go OWNER/NAME --remove-uploaded"
    return DiskNeeds(needed, probes, ["give a smaller --window", publish] if remote else [publish])
