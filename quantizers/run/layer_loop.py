"""The loop over decoder layers: materialise, observe, solve, stitch, propagate, journal.

Statistics come from a forced pass (every expert sees every token); hidden states come from natural routing
(the next layer reads what the quantized layer really outputs). While one layer is being solved, the next
one's bytes are read in the background; while its output is computed, its shard is written. A layer is done
once its shard and the states after it are on disk: then its journal entry is written, and only after that
are the states before it removed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantizers.calibration.data import CalibrationData
from quantizers.checkpoint.background import in_background, read_ahead
from quantizers.device.allocator import release_free_memory, use_one_arena
from quantizers.device.devices import forward_dtype
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import route_counts
from quantizers.forward.states import Rows
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.solve.layer import LayerStores, install, solve_layer
from quantizers.system.atomic import write_json
from quantizers.system.errors import QuantizeError
from quantizers.system.progress import layer_line, peak_memory, progress
from stitch.write.digests import ShardDigest
from stitch.write.shard import layer_tensors, write_shard


def quantize_layers(
    job: Job, data: CalibrationData, tokens: list[torch.Tensor], context: Context, *, compensate_router: bool = True
) -> None:
    """Write one shard and one journal entry for each decoder layer, under the context's `work`.

    Args:
        data, tokens: the calibration samples, and their token ids (T,) int64.
        context: of rank 0; the other ranks call `assist_layers`. Its `work` holds `layers/` and `output/`; layers
            that have a journal entry there are skipped.
        compensate_router: False reproduces the defect of the published recipe, for comparison (llmcompressor only).

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
    """
    layers, work, ranks = job.sizes["layers"], context.work, context.ranks
    done = len(journal.done_layers(work, layers))
    if done == layers:
        ranks.broadcast("layers", None)
        return
    use_one_arena()
    model = _layered_model(job, context.device)
    model.head()  # read only to check it: otherwise a NaN in it would be found after the last layer
    lengths = [len(sequence) for sequence in tokens]
    share = _Share(job, model, context, lengths, compensate_router)
    # Do not bind the states to a name here: a memory map that is still referenced keeps its pages, and its file's
    # blocks on disk, after the unlink.
    results = share.layers(done, _entering(work, done, model, tokens))
    ranks.broadcast("layers", {"done": done, "chunk": context.chunk, "lengths": lengths})
    with progress("quantizing", layers, done, "layer") as step:
        for entry, stores in results:
            entry["routed"] = _routed(data, stores.chosen, job.sizes["experts"])
            entry["peak_memory_bytes"] = peak_memory(context.device)
            write_json(journal.layer_file(work, entry["layer"]), entry)
            journal.log(work, layer_line(entry))
            rounding = entry["error"].get("down_rounding") or 0.0
            step(f"{sum(entry['seconds'].values()):.1f} s, rounding error {rounding:.4f}")


def assist_layers(job: Job, context: Context) -> None:
    """What the other ranks do while rank 0 is in `quantize_layers`: their share of every layer, without a journal.

    Args:
        context: its chunk is not used; rank 0 broadcasts the one that all ranks work with.
    """
    message = context.ranks.receive("layers")
    if message is None:
        return
    use_one_arena()
    model = _layered_model(job, context.device)
    share = _Share(job, model, replace(context, chunk=message["chunk"]), message["lengths"], True)
    for _ in share.layers(message["done"], share.rows(f"states-{message['done']:05d}.bin")):
        pass


def _layered_model(job: Job, device: torch.device) -> LayeredModel:
    return LayeredModel(job.opened, job.facts, job.sizes, device, forward_dtype(device))


@dataclass(frozen=True)
class _Share:
    """One rank's share of the work on the layers; with a single process, all of it."""

    job: Job
    model: LayeredModel
    context: Context
    lengths: list[int]
    compensate_router: bool

    def rows(self, name: str, width: int | None = None, dtype: torch.dtype | None = None) -> Rows:
        """A file with one row per token; of hidden states, unless `width` and `dtype` are given."""
        return Rows(
            self.context.work / name, self.lengths, width or self.job.sizes["hidden"], dtype or self.model.dtype
        )

    def stores(self) -> LayerStores:
        """The files that hold the inputs of a layer's experts."""
        chosen = self.job.sizes["chosen"]
        return LayerStores(
            self.rows("x.bin"),
            self.rows("chosen.bin", chosen, torch.int32),
            self.rows("weight.bin", chosen, torch.float32),
        )

    def layers(self, done: int, states: Rows) -> Iterator[tuple[dict[str, Any], LayerStores]]:
        """Work through the layers, from layer `done` on.

        Args:
            states: hidden states that enter layer `done`.

        Yields:
            When all files of a layer are on disk: its journal entry, without routed counts and memory, and what its
            experts were called with. Asking for the next layer marks this one as done: the states that entered it
            are removed.
        """
        stores = self.context.ranks.rank_zero_first(self.stores)
        for number in range(done, self.job.sizes["layers"]):
            self.context.check()
            try:
                entry, following = self._layer(number, states, stores)
            except torch.OutOfMemoryError:
                raise QuantizeError(
                    f"layer {number}: the device's memory is full; give the same command again with a smaller "
                    "--device-memory"
                ) from None
            yield entry, stores
            if self.context.ranks.leads:
                states.path.unlink()
            states = following
            release_free_memory()
        if self.context.ranks.leads:
            for rows in (states, stores.x, stores.chosen, stores.weight):
                rows.path.unlink()

    def _layer(self, number: int, states: Rows, stores: LayerStores) -> tuple[dict[str, Any], Rows]:
        job, model, context, ranks = self.job, self.model, self.context, self.context.ranks
        source, shard, watch = model.checkpoint, job.plan.shard_file(number), _Watch()
        later = job.plan.of_layer(number + 1) if ranks.leads and number + 1 < job.sizes["layers"] else []
        ahead = [source.tensors[action.source] for action in later]
        with model.layer(number) as layer, read_ahead(ahead):
            watch.lap("materialise")
            following = ranks.rank_zero_first(lambda: self.rows(f"states-{number + 1:05d}.bin"))
            solved, seconds = solve_layer(
                model,
                layer,
                number,
                states,
                stores,
                job.plan.settings(number),
                chunk=context.chunk,
                check=context.check,
                compensate_router=self.compensate_router,
                ranks=ranks,
            )
            watch.skip(seconds)
            write: Callable[[], ShardDigest | None] = _nothing
            if ranks.leads:
                tensors = layer_tensors(job.plan, number, source, solved)
                write = partial(write_shard, tensors, context.work / "output" / shard)
            install(model, layer, solved)
            watch.lap("stitch")
            with in_background(write) as written:
                _propagate(model, layer, number, states, following, context)
                watch.lap("propagate")
                digest = written()
            ranks.barrier()
            if ranks.leads:
                following.flush()
            watch.lap("write")
        entry = {
            "layer": number,
            "shard": shard,
            "digest": digest,
            "seconds": watch.seconds,
            # JSON has no infinity. An infinite error means that an expert's weights or inputs overflow.
            "error": {key: value if math.isfinite(value) else None for key, value in solved.error.items()},
            "fallbacks": _by_expert(solved.fallbacks),
            "leaning": solved.leaning and solved.leaning.as_dict(),
        }
        return entry, following


def _nothing() -> None:
    """Takes the place of writing the shard in all ranks except 0."""


class _Watch:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under this phase."""
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now

    def skip(self, seconds: dict[str, float]) -> None:
        """Book the time since the last lap under these phases, which were timed elsewhere."""
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


def _propagate(
    model: LayeredModel,
    layer: torch.nn.Module,
    number: int,
    states: Rows,
    following: Rows,
    context: Context,
) -> None:
    for i in context.ranks.round_robin(len(states)):
        output = model.run(layer, states[i])[0]
        if not bool(torch.isfinite(output).all()):
            raise QuantizeError(
                f"layer {number}: its output is not finite and would spoil the layers after it; the run stops here"
            )
        following[i] = output
        context.check()


def _by_expert(lines: Sequence[str]) -> list[str]:
    """Sort lines by expert number, so that the report does not depend on how many experts were solved at a time."""

    def expert(line: str) -> int:
        match = re.match(r"expert (\d+)", line)
        return int(match[1]) if match else -1

    return sorted(lines, key=expert)


def _routed(data: CalibrationData, chosen: Rows, experts: int) -> list[list[int]]:
    """Tokens routed to each expert: a row per category, in alphabetical order of the categories."""
    names = sorted({sample.category for sample in data.samples})
    counts = np.zeros((len(names), experts), dtype=np.int64)
    for i, sample in enumerate(data.samples):
        counts[names.index(sample.category)] += route_counts(chosen[i].long(), experts).numpy()
    rows: list[list[int]] = counts.tolist()
    return rows
