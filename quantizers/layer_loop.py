"""The loop over decoder layers: materialise, observe, solve, stitch, propagate, journal.

Statistics are forced (every expert sees every token), states are natural (the next layer sees what
the quantized layer really puts out). While a layer is worked on, the next one's bytes are read; while
its output is computed, its shard is written. A layer counts as done when shard and next states are on
the disk: then its journal entry is written, and only then the states before it are removed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stitch.assemble import layer_tensors, write_shard

from . import journal
from .atomic import write_json
from .calibration import CalibrationData
from .checkpoint import Checkpoint
from .errors import QuantizeError
from .heap import give_back, map_large_blocks
from .layers import LayeredModel
from .overlap import in_background, read_ahead
from .progress import layer_line, peak_memory, progress
from .safetensors_header import TensorInfo
from .session import Job, forward_dtype
from .solve_layer import LayerStores, install, solve_layer
from .states import Rows
from .statistics import route_counts


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
    """Write one shard and one journal entry for each decoder layer, under `work`.

    Args:
        data, tokens: the calibration samples, and their token numbers (T,) int64.
        work: holds `layers/` and `output/`; layers that have a journal entry there are not done again.
        chunk: experts solved at a time.
        check: called between steps; may raise to interrupt.
        compensate_router: False leaves the published defect in, for comparison (llmcompressor only).

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
    """
    layers, hidden = job.sizes["layers"], job.sizes["hidden"]
    done = len(journal.done_layers(work, layers))
    if done == layers:
        return
    map_large_blocks()
    dtype = forward_dtype(device)
    model = LayeredModel(source, job.facts, job.sizes, device, dtype)
    model.head()  # only read: a NaN in it would otherwise be found after the last layer
    lengths = [len(t) for t in tokens]
    states = _entering(work, done, model, tokens)
    stores = LayerStores(
        Rows(work / "x.bin", lengths, hidden, dtype),
        Rows(work / "chosen.bin", lengths, job.sizes["chosen"], torch.int32),
        Rows(work / "weight.bin", lengths, job.sizes["chosen"], torch.float32),
    )
    with progress("quantizing", layers, done, "layer") as step:
        for number in range(done, layers):
            check()
            watch = _Watch()
            following = Rows(work / f"states-{number + 1:05d}.bin", lengths, hidden, dtype)
            ahead = _source_tensors(job, source, number + 1) if number + 1 < layers else []
            try:
                with model.layer(number) as layer, read_ahead(ahead):
                    watch.lap("materialise")
                    solved, seconds = solve_layer(
                        model, layer, number, states, stores, job.plan.settings(number), chunk, check, compensate_router
                    )
                    watch.skip(seconds)
                    shard = job.plan.shard_file(number)
                    tensors = layer_tensors(job.plan, number, source, solved)
                    install(model, layer, solved)
                    watch.lap("stitch")
                    with in_background(partial(write_shard, tensors, work / "output" / shard)) as written:
                        _propagate(model, layer, number, states, following, check)
                        watch.lap("propagate")
                        digest = written()
                    following.flush()
                    watch.lap("write")
            except torch.OutOfMemoryError:
                raise QuantizeError(
                    f"layer {number}: the device's memory is full; give the same command again with a smaller "
                    "--device-memory"
                ) from None
            entry = {
                "layer": number,
                "shard": shard,
                "sha256": digest,
                "seconds": watch.seconds,
                # JSON has no infinity; an error that large says that an expert's weights or inputs overflow.
                "error": {key: value if math.isfinite(value) else None for key, value in solved.error.items()},
                "fallbacks": _by_expert(solved.fallbacks),
                "routed": _routed(data, stores.chosen, job.sizes["experts"]),
                "peak_memory_bytes": peak_memory(device),
            }
            write_json(journal.layer_file(work, number), entry)
            journal.log(work, layer_line(entry))
            states.path.unlink()
            states = following
            rounding = solved.error.get("down_rounding", 0.0)
            del solved, tensors  # or they would still be there while the next layer is solved
            give_back()
            step(f"{sum(watch.seconds.values()):.1f} s, rounding error {rounding:.4f}")
    for rows in (states, stores.x, stores.chosen, stores.weight):
        rows.path.unlink()


class _Watch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """All the time since the last lap was this phase."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now

    def skip(self, seconds: dict[str, float]) -> None:
        """The time since the last lap has been measured by someone else."""
        self.seconds |= seconds
        self._last = time.monotonic()


def _entering(work: Path, done: int, model: LayeredModel, tokens: list[torch.Tensor]) -> Rows:
    """The hidden states that enter layer `done`."""
    path = work / f"states-{done:05d}.bin"
    if done and not path.exists():
        raise QuantizeError(f"{path}: is gone, and with it what the next layer reads; start over with --fresh")
    states = Rows(path, [len(t) for t in tokens], model.sizes["hidden"], model.dtype)
    if done == 0:
        table = model.embedding()
        for i, sequence in enumerate(tokens):
            states[i] = table[sequence.to(model.device)]
    return states


def _source_tensors(job: Job, source: Checkpoint, layer: int) -> list[TensorInfo]:
    return [source.tensors[action.source] for action in job.plan.of_layer(layer)]


def _propagate(
    model: LayeredModel,
    layer: torch.nn.Module,
    number: int,
    states: Rows,
    following: Rows,
    check: Callable[[], None],
) -> None:
    for i in range(len(states)):
        output = model.run(layer, states[i])[0]
        if not bool(torch.isfinite(output).all()):
            raise QuantizeError(
                f"layer {number}: its output is not finite and would spoil the layers after it; the run stops here"
            )
        following[i] = output
        check()


def _by_expert(lines: Sequence[str]) -> list[str]:
    """Sorted by expert, so that the report does not depend on how many experts were solved at a time."""

    def expert(line: str) -> int:
        match = re.match(r"expert (\d+)", line)
        return int(match[1]) if match else -1

    return sorted(lines, key=expert)


def _routed(data: CalibrationData, chosen: Rows, experts: int) -> list[list[int]]:
    """Tokens sent to each expert, a row for each category in the order of their names."""
    names = sorted({sample.category for sample in data.samples})
    counts = np.zeros((len(names), experts), dtype=np.int64)
    for i, sample in enumerate(data.samples):
        counts[names.index(sample.category)] += route_counts(chosen[i].long(), experts).numpy()
    rows: list[list[int]] = counts.tolist()
    return rows
