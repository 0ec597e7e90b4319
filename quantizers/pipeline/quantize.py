"""Quantizes a checkpoint layer by layer: the loop over the layers with its journal, resumed where it was interrupted.

A layer is done once its shard and the held-out states after it are on disk: then its journal entry is written, and
only after that are the states before it removed. A call that resumes first takes the calibration states through the
finished layers, as stored in their shards; a shard that was damaged meanwhile is made again on the way, and must
get the bytes that the journal has for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eval.fidelity.comparison import Comparison
from eval.fidelity.metrics import Measured, Text
from eval.fidelity.scoring import score
from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, load_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import forward_dtype, is_accelerator, use_one_arena
from quantizers.distributed.process_group import rank_0_progress
from quantizers.layers.context import Context
from quantizers.layers.loop import all_tensors, device_memory_errors, finished_shard, layer_steps, resume_layers
from quantizers.layers.step import LayerStep, run_step
from quantizers.layers.writer import ShardWriter
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.output import journal
from quantizers.planning.job import Job
from quantizers.recipe.schema import Stop
from quantizers.system.errors import QuantizeError, Stopped
from quantizers.system.files import write_json
from quantizers.system.progress import doing, forecast, peak_memory, progress
from stitch.audit.layer import written_from
from stitch.write.shard import kept_hashes, layer_tensors, write_shard

from .quantizer import Quantizer, Written, of_shard


@dataclass(frozen=True)
class _Start:
    """What rank 0 tells the others before the first layer.

    Attributes:
        done: layers that an earlier call finished.
        damaged: those of them whose shards must be made again.
        lengths: tokens of each calibration sequence.
        pending: shards that may be unfinished while the next layer is solved; None for the writer's own choice.
    """

    done: int
    damaged: tuple[int, ...]
    lengths: tuple[int, ...]
    pending: int | None


def quantize_layers(
    job: Job,
    data: CalibrationData | None,
    tokens: Sequence[torch.Tensor] | None,
    context: Context,
    texts: Sequence[Text] = (),
    *,
    damaged: Sequence[int] = (),
    stop: Stop | None = None,
) -> Measured | None:
    """Write all shards, with a journal entry for each, under the context's `work`; measure them on the way.

    All processes of a run call this; rank 0 alone knows what to do, and keeps the journal.

    Args:
        data, tokens: the calibration samples, and their token ids (T,) int64; None in all ranks except 0.
        context: its `work` holds `layers/` and `output/`; layers that have a journal entry there are not made again.
        texts: held-out texts; empty for none.
        damaged: finished layers whose shards must be made again.
        stop: the figures of a layer after which the run stops.

    Returns:
        What the output does with the texts, compared with the source; None without texts, and of no use in ranks
        except 0.

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
        Stopped: a layer's figures are beyond `stop`.
    """
    dist = context.dist
    entries = journal.done_layers(context.work, job.sizes["layers"]) if dist.is_main else []
    for entry in entries:
        _refuse(entry, stop)
    # With limits for each layer, a run that stops after one has not worked on the next.
    lengths = tuple(len(sequence) for sequence in tokens or ())
    start: _Start = dist.broadcast_object(_Start(len(entries), tuple(damaged), lengths, 0 if stop else None))
    use_one_arena()
    with ThreadPoolExecutor(max_workers=1) as background:
        run = _Run(job, context, start, texts, background)
        run.begin(tokens)
        run.resume(entries)
        _work(run, data, entries, stop)
        return run.measured([entry["held_out"] for entry in entries])


class _Run:
    """The models, states and consumers of one process.

    Args:
        background: one thread, which writes shards and held-out states.
    """

    def __init__(self, job: Job, context: Context, start: _Start, texts: Sequence[Text], background: Executor) -> None:
        self.job, self.context, self.start, self.texts, dist = job, context, start, texts, context.dist
        outside = load_tensors(job.opened, [action.source for action in job.plan.of_layer(None)])
        self.model = StreamedModel(outside, job.facts, job.sizes, context.device, forward_dtype(context.device))
        self.model.head()  # only to check it: otherwise a NaN in it would be found after the last layer
        folder = context.work / "held-out"
        if dist.is_main:
            folder.mkdir(exist_ok=True)
        device = context.device if context.texts_on_device else None
        new = partial(ActivationStream, durable=True, check=context.check, dist=dist, device=device, writer=background)
        lengths = [len(text.tokens) for text in texts]
        self.streams = [
            new(name, self.model, number, lengths, folder)
            for number, name in enumerate((job.opened.name, "the output"))
        ]
        self.writer: ShardWriter[Any, Any] = ShardWriter(
            dist, background, background=dist.is_distributed or is_accelerator(context.device)
        )
        self.quantizer = Quantizer(job, self.model, self.streams[1], context, start.lengths, writer=self.writer)
        self.comparison = Comparison(self.streams[0], [self.quantizer], texts, dist)

    def begin(self, tokens: Sequence[torch.Tensor] | None) -> None:
        """Embed the texts, those of the calibration set if they are needed, and write the passthrough shards.

        Of the tensors outside the layers only what the end needs stays in memory.

        Args:
            tokens: of the calibration set; None in all ranks except 0.
        """
        done, job = self.start.done, self.job
        for stream in self.streams:
            if done == 0:
                stream.embed([text.tokens for text in self.texts])
            else:
                stream.resume(done)
                stream.forget(done - 1)  # which a kill may have left
        if done < job.sizes["layers"] or self.start.damaged:
            self.quantizer.embed(tokens)
        outside = self.model.checkpoint
        assert isinstance(outside, LoadedTensors)
        if self.context.dist.is_main:
            write_passthrough(job, outside, self.context)
        self.model.checkpoint = outside.only([job.facts.head])

    def resume(self, entries: Sequence[dict[str, Any]]) -> None:
        """Take the calibration states through the finished layers, and make damaged ones again."""
        start, job, context = self.start, self.job, self.context
        output = context.work / "output"
        resume_layers(
            start.done if start.done < job.sizes["layers"] else max(start.damaged, default=-1) + 1,
            start.damaged,
            follow=lambda number: self.quantizer.follow(
                number, finished_shard(job.opened, output / job.plan.shard_file(number), context.dist)
            ),
            make_again=partial(self._make_again, entries),
            check=context.check,
            dist=context.dist,
        )

    def _make_again(self, entries: Sequence[dict[str, Any]], number: int) -> None:
        source, dist = self.job.opened, self.context.dist
        loaded = load_tensors(source, layer_names(source, self.job.facts, number))
        step = LayerStep(number, loaded, loaded.to(self.model.device))
        run_step(step, self.model, [Comparison(self.streams[0], [self.quantizer], (), dist)])
        (shard,) = self.writer.finished(pending=0).values()
        if dist.is_main:
            made = self.quantizer.entry(step) | of_shard(shard)
            for key, what in (("source", "the source's tensors have"), ("digest", "it gets")):
                if made[key] != entries[number][key]:
                    raise QuantizeError(
                        f"layer {number}: its damaged shard was made again, but {what} other bytes than the first "
                        "time; start over with --fresh"
                    )
            print(f"layer {number}: its shard was made again, with the bytes that it had", file=sys.stderr)
        dist.barrier()

    def steps(self) -> Any:
        """The loop over the layers that are left; to be closed."""
        context, source = self.context, self.job.opened
        return closing(
            layer_steps(
                source,
                all_tensors(self.model, source, self.start.done),
                [self.comparison],
                self.model,
                check=context.check,
                dist=context.dist,
                early=context.prefetch_to_device,
            )
        )

    def written(self, step: LayerStep | None) -> dict[int, Written]:
        """The shards that are on disk since the last call; after the last step, with None, all the rest."""
        if step is None:
            self.quantizer.remove()
            return self.writer.finished(pending=0)
        with device_memory_errors(step.number):  # of the audit, which ran beside the step
            doing("audit")
            shards = self.writer.finished(self.start.pending)
            step.watch.lap("write")
        return shards

    def forget(self, number: int) -> None:
        """Remove the held-out states that entered a layer, which is in the journal."""
        for stream in self.streams:
            stream.forget(number)

    def measured(self, compared: Sequence[dict[str, Any]]) -> Measured | None:
        """Score the texts, and put all figures together; None without texts, and of no use in other processes."""
        if not self.texts:
            return None
        stage = partial(rank_0_progress, check=self.context.check, dist=self.context.dist)
        source, output = score(self.streams, self.texts, stage, dist=self.context.dist)
        return Measured(source[0], *output, compared)


def _work(run: _Run, data: CalibrationData | None, entries: list[dict[str, Any]], stop: Stop | None) -> None:
    """The loop over the layers that are left; rank 0 adds the journal entry of each one that is done to `entries`."""
    work, begun = run.context.work, dict[int, dict[str, Any]]()  # begun: layers whose shards are not on disk yet
    layers, is_main = run.job.sizes["layers"], run.context.dist.is_main
    say_forecast = forecast(layers)
    shown = progress("quantizing", layers, len(entries), "layer", trusted=1) if is_main else nullcontext(lambda _: None)

    def done(shards: dict[int, Written]) -> None:
        for number, shard in shards.items():
            if number not in begun:  # in the other ranks
                run.forget(number)
                continue
            entry = begun.pop(number) | of_shard(shard)
            for stream in run.streams:
                stream.on_disk(number + 1)  # from there a run resumes once the layer is journaled
            write_json(journal.layer_file(work, number), entry)
            entries.append(entry)
            run.forget(number)
            show(_note(entry))
            say_forecast(entry)
            _refuse(entry, stop)

    with shown as show, run.steps() as steps:
        for step in steps:
            shards = run.written(step)
            if data is not None:
                begun[step.number] = run.quantizer.entry(step) | {
                    "routed": run.quantizer.routed(data, step.number),
                    "held_out": run.comparison.found[0] if run.comparison.found else None,
                    "peak_memory_bytes": peak_memory(run.context.device),
                }
            done(shards)
        done(run.written(None))


def write_passthrough(job: Job, outside: Checkpoint, context: Context) -> None:
    """Write every shard that nothing computes anew, and its journal entry, unless that is done.

    Args:
        outside: the tensors outside the layers. Those of a layer that predicts further tokens are read here, one layer
            at a time.
    """
    plan, source = job.plan, job.opened
    for part in plan.passthrough_parts:
        file, shard = journal.passthrough_file(context.work, part), context.work / "output" / plan.shard_file(part)
        if file.exists() and shard.exists():
            continue
        actions = plan.of_layer(part)
        stored = outside if part is None else load_tensors(source, [action.source for action in actions])
        kept = kept_hashes(plan, part, stored)
        digest = write_shard(layer_tensors(plan, part, stored, None).host, shard, kept, plan.unread(part))
        write_json(file, {"shard": shard.name, "digest": digest, "audit": written_from(actions).as_dict()})
        context.check()


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
            f"stopped after layer {entry['layer']}: {problem}; give the same command with --ignore-stop to continue"
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
