"""The loop of a run over the decoder layers: visit, journal, go on where an earlier call stopped.

A layer is done once its shard and the held-out states after it are on disk: then its journal entry is written, and
only after that are the states before it removed. A call that goes on first takes the calibration states through the
finished layers, as they lie in their shards; a shard that was damaged meanwhile is made again on the way, and must
get the bytes that the journal has for it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from eval.fidelity.figures import Measured, Text
from eval.fidelity.score import measured, score
from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.ahead import passed_on, received
from quantizers.checkpoint.held import Held, hold, layer_names
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.allocator import release_free_memory, use_one_arena
from quantizers.device.devices import forward_dtype
from quantizers.forward.lane import Lane
from quantizers.forward.layered_model import LayeredModel
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.recipe.schema import Stop
from quantizers.system.errors import QuantizeError, Stopped
from quantizers.system.files import write_json
from quantizers.system.progress import doing, layer_line, peak_memory, progress
from quantizers.team.shown import shown

from .kept_shards import write_kept
from .quantized import Quantized, of_shard
from .shards import Shards, Written
from .visit import Visit, device_memory_errors, visits


def quantize_layers(
    job: Job,
    data: CalibrationData,
    tokens: Sequence[torch.Tensor],
    context: Context,
    texts: Sequence[Text] = (),
    *,
    damaged: Sequence[int] = (),
    stop: Stop | None = None,
    compensate_router: bool = True,
) -> Measured | None:
    """Write all shards, with a journal entry for each, under the context's `work`; measure them on the way.

    Args:
        data, tokens: the calibration samples, and their token ids (T,) int64.
        context: of rank 0; the other processes call `assist_layers`. Its `work` holds `layers/` and `output/`; layers
            that have a journal entry there are not visited again.
        texts: held-out texts; empty for none.
        damaged: finished layers whose shards must be made again.
        stop: the figures of a layer after which the run stops.
        compensate_router: False reproduces the defect of the published recipe, for comparison (llmcompressor only).

    Returns:
        What the output does with the texts, compared with the source; None without texts.

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
        Stopped: a layer's figures are beyond `stop`.
    """
    layers, work = job.sizes["layers"], context.work
    entries = journal.done_layers(work, layers)
    for entry in entries:
        _refuse(entry, stop)
    lengths = [len(sequence) for sequence in tokens]
    # With limits for each layer, a run that stops after one has not worked on the next.
    order = {"done": len(entries), "damaged": list(damaged), "lengths": lengths, "ahead": 0 if stop else None}
    context.team.tell(order)
    with ExitStack() as stack:
        loop = _Loop(job, context, order, texts, stack, compensate_router)
        loop.begin(tokens)
        loop.go_on(entries)
        with progress("quantizing", layers, len(entries), "layer", trusted=1) as step:
            visited: dict[int, dict[str, Any]] = {}  # whose shards are not on disk yet
            for visit, written in loop.written(stack):
                if visit is not None:
                    visited[visit.number] = loop.candidate.entry(visit) | {
                        "routed": loop.candidate.routed(data, visit.number),
                        "held_out": visit.compared[0] if visit.compared else None,
                        "peak_memory_bytes": peak_memory(context.device),
                    }
                for number, shard in written.items():
                    entry = visited.pop(number) | of_shard(shard)
                    loop.on_disk(number)
                    write_json(journal.layer_file(work, number), entry)
                    journal.log(work, layer_line(entry))
                    entries.append(entry)
                    loop.forget(number)
                    step(_note(entry))
                    _refuse(entry, stop)
        return loop.measured([entry["held_out"] for entry in entries])


def assist_layers(job: Job, context: Context, texts: Sequence[Text]) -> None:
    """What the others do while rank 0 is in `quantize_layers`: their share of every layer, without a journal."""
    order = context.team.tell()
    with ExitStack() as stack:
        loop = _Loop(job, context, order, texts, stack, True)
        loop.begin(None)
        loop.go_on(())
        for _, written in loop.written(stack):
            for number in written:
                loop.forget(number)
        loop.measured(())


class _Loop:
    """One process's part of the loop, which is all of it with a single process.

    Args:
        order: from rank 0: how many layers are `done`, which of them are `damaged`, and the sequences' `lengths`.
        stack: holds what must be closed.
    """

    def __init__(
        self,
        job: Job,
        context: Context,
        order: dict[str, Any],
        texts: Sequence[Text],
        stack: ExitStack,
        compensate_router: bool,
    ) -> None:
        use_one_arena()
        self.job, self.context, self.texts = job, context, texts
        self.done, self.damaged, self.ahead = order["done"], order["damaged"], order["ahead"]
        source, facts = job.opened, job.facts
        outside = hold(source, [action.source for action in job.plan.of_layer(None)])
        self.model = LayeredModel(outside, facts, job.sizes, context.device, forward_dtype(context.device))
        self.model.head()  # only to check it: otherwise a NaN in it would be found after the last layer
        folder = context.work / "held-out"
        if context.team.leads:
            folder.mkdir(exist_ok=True)
        lengths = [len(text.tokens) for text in texts]
        there = context.device if context.texts_there else None
        writer = stack.enter_context(ThreadPoolExecutor(max_workers=1))
        lane = partial(Lane, durable=True, check=context.check, team=context.team, device=there, writer=writer)
        self.lanes = [
            lane(name, self.model, number, lengths, folder) for number, name in enumerate((source.name, "the output"))
        ]
        self.candidate = Quantized(
            job,
            self.model,
            self.lanes[1],
            context,
            order["lengths"],
            shards=Shards(job, context, writer),
            compensate_router=compensate_router,
        )

    def begin(self, tokens: Sequence[torch.Tensor] | None) -> None:
        """Embed the texts, those of the calibration set if they are needed, and write what lies outside the layers.

        Of that, only what the end needs stays in memory.

        Args:
            tokens: of the calibration set; None in all ranks except 0.
        """
        layers = self.job.sizes["layers"]
        for lane in self.lanes:
            if self.done == 0:
                lane.embed([text.tokens for text in self.texts])
            else:
                lane.resume(self.done)
                lane.forget(self.done - 1)  # which a kill may have left
        if self.done < layers or self.damaged:
            self.candidate.embed(tokens)
        outside = self.model.checkpoint
        assert isinstance(outside, Held)
        if self.context.team.leads:
            write_kept(self.job, outside, self.context)
        self.model.checkpoint = outside.only([self.job.facts.final_norm, self.job.facts.head])

    def go_on(self, entries: Sequence[dict[str, Any]]) -> None:
        """Take the calibration states through the finished layers, and make damaged ones again."""
        last = self.done if self.done < self.job.sizes["layers"] else max(self.damaged, default=-1) + 1
        if not last:
            return
        with shown("going on", last, 0, self.context.check, self.context.team) as step:
            for number in range(last):
                with device_memory_errors(number):
                    if number in self.damaged:
                        self._make_again(number, entries)
                    else:
                        self.candidate.follow(number, self._finished(number))
                release_free_memory()
                step(f"layer {number}")

    def _finished(self, number: int) -> Held:
        """The tensors of a finished shard, which rank 0 reads from its file and passes on."""
        source, folder, team = self.job.opened, self.context.work / "output", self.context.team
        if not team.leads:
            return received(team)
        tensors = read_header(folder / self.job.plan.shard_file(number))
        return passed_on(hold(Checkpoint(folder, source.name, source.config, tensors), tensors), team)

    def _make_again(self, number: int, entries: Sequence[dict[str, Any]]) -> None:
        source, team = self.job.opened, self.context.team
        held = hold(source, layer_names(source, self.job.facts, number))
        visit = Visit(number, held, held.to(self.model.device))
        with self.model.layer(number, visit.there, experts=False) as layer:
            self.candidate.prepare(visit, layer)
        with self.candidate.layer(visit):
            pass
        (shard,) = self.candidate.shards.finished(ahead=0).values()
        if team.leads:
            made = self.candidate.entry(visit) | of_shard(shard)
            for key, what in (("source", "the source's tensors have"), ("digest", "it gets")):
                if made[key] != entries[number][key]:
                    raise QuantizeError(
                        f"layer {number}: its damaged shard was made again, but {what} other bytes than the first "
                        "time; start over with --fresh"
                    )
            print(f"layer {number}: its shard was made again, with the bytes that it had", file=sys.stderr)
        team.barrier()

    def written(self, stack: ExitStack) -> Iterator[tuple[Visit | None, dict[int, Written | None]]]:
        """Each visit to the layers that are left, with the shards that are on disk since the one before it.

        After the last visit comes None, with the rest of the shards.
        """
        for visit in stack.enter_context(closing(self._visits())):
            with device_memory_errors(visit.number):  # of the audit, which ran beside the visit
                doing("audit")
                written = self.candidate.shards.finished(self.ahead)
                visit.watch.lap("write")
            yield visit, written
        yield None, self.candidate.shards.finished(ahead=0)

    def on_disk(self, number: int) -> None:
        """Wait for the held-out states that left a layer, from which a run goes on once the layer is in the journal."""
        for lane in self.lanes:
            lane.on_disk(number + 1)

    def forget(self, number: int) -> None:
        """Remove the held-out states that entered a layer, which is in the journal."""
        for lane in self.lanes:
            lane.forget(number)

    def _visits(self) -> Generator[Visit]:
        yield from visits(
            self.job.opened,
            self.lanes[0],
            [self.candidate],
            self.texts,
            self.done,
            check=self.context.check,
            team=self.context.team,
            early=self.context.next_there,
        )
        self.candidate.remove()

    def measured(self, compared: Sequence[dict[str, Any]]) -> Measured | None:
        """Score the texts, and put all figures together; None without texts, and of no use in other processes."""
        if not self.texts:
            return None

        stage = partial(shown, check=self.context.check, team=self.context.team)
        source, output = score(self.lanes, self.texts, stage, team=self.context.team)
        return measured(source, output, self.texts, compared)


def _refuse(entry: dict[str, Any], stop: Stop | None) -> None:
    """Stop after a layer whose figures are beyond what the recipe allows."""
    figures = entry["held_out"]
    if stop is None or not figures:
        return
    error, agreement = figures["hidden_error"], figures["agreement"]
    problem = ""
    if stop.max_hidden_error is not None and not error <= stop.max_hidden_error:
        problem = f"hidden error {error:.4g} > {stop.max_hidden_error:g} (verify.stop.max_hidden_error)"
    elif stop.min_router_agreement is not None and agreement is not None and not agreement >= stop.min_router_agreement:
        problem = f"router agreement {agreement:.4g} < {stop.min_router_agreement:g} (verify.stop.min_router_agreement)"
    if problem:
        raise Stopped(
            f"stopped after layer {entry['layer']}: {problem}; give the same command with --ignore-stop to go on"
        )


def _note(entry: dict[str, Any]) -> str:
    """What is shown of a layer when it is done."""
    parts = [f"{sum(entry['seconds'].values()):.1f} s"]
    if entry["routed"]:
        parts.append(f"rounding {entry['error'].get('down_rounding') or 0.0:.4f}")
    if entry["closeness"]:
        parts.append(f"experts within {entry['closeness']['worst']:.1%}")
    if entry["held_out"]:
        parts.append(f"hidden error {entry['held_out']['hidden_error']:.4f}")
        if entry["held_out"]["agreement"] is not None:
            parts.append(f"router agreement {entry['held_out']['agreement']:.2%}")
    return ", ".join(parts)
