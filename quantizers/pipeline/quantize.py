"""Quantizes a checkpoint: begins or resumes, takes the layers one by one (layer.py), and measures the output.

A call that resumes first takes the calibration states through the
finished layers, as stored in their shards, with about a twentieth of the operations that quantizing took: these states
are in memory where they fit, else in files that are overwritten in place, and never durable. A shard that was damaged
meanwhile is made again on the way, and must get the bytes that the journal has for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

import torch

from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.loaded_tensors import (
    LoadedTensors,
    broadcast_tensors,
    layer_names,
    load_once,
    load_tensors,
)
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.devices import forward_dtype, is_accelerator, release_free_memory, use_one_arena
from quantizers.distributed.process_group import SINGLE_PROCESS, rank_0_progress
from quantizers.eval.fidelity.metrics import Measured, Text
from quantizers.eval.fidelity.scoring import score
from quantizers.eval.fidelity.variants import Variants, variants_of
from quantizers.model.activation_stream import ActivationStream, embed
from quantizers.model.layer_forward import attend
from quantizers.model.streamed_model import StreamedModel
from quantizers.output import journal
from quantizers.planning.job import Job, parts_of_run
from quantizers.recipe.schema import Stop
from quantizers.stitch.audit.layer import written_from
from quantizers.stitch.write.shard import converted_tensors, copy_shard, kept_hashes, layer_tensors, write_shard
from quantizers.system.errors import QuantizeError
from quantizers.system.files import write_json
from quantizers.walk.context import Context
from quantizers.walk.walk import LayerStep, memory_is_full, walk

from .layer import Run, quantize_from, quantize_layer
from .layer_entry import LayerEntry, read_entries, refuse_layer
from .observer import Observer
from .quantizer import Quantizer
from .shard_writer import ShardWriter

OBSERVED = "imatrix"  # folder of a run's observer


def quantize_layers(
    job: Job,
    data: CalibrationData | None,
    tokens: Sequence[torch.Tensor] | None,
    context: Context,
    texts: Sequence[Text] = (),
    *,
    damaged: Sequence[int] = (),
    stop: Stop | None = None,
    observer: Observer | None = None,
) -> Measured | None:
    """Write all shards, with a journal entry for each, under the context's `work`; measure them on the way.

    All processes of a run call this; rank 0 alone knows what to do, and keeps the journal.

    Args:
        data, tokens: the calibration samples, and their token ids (T,) int64; None in all ranks except 0.
        context: its `work` holds `layers/` and `output/`; layers that have a journal entry there are not made again.
        damaged: finished layers whose shards must be made again.
        stop: the figures of a layer after which the run stops.
        observer: takes the calibration samples through the source's layers too, with files in `OBSERVED`.

    Returns:
        What the output does with the texts, compared with the source; None without texts, and of no use in ranks
        except 0.

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
        Stopped: a layer's figures are beyond `stop`.
    """
    dist, layers = context.dist, job.facts.num_layers
    entries = read_entries(context.work, layers) if dist.is_main else []
    for entry in entries:
        refuse_layer(entry, stop)
    start: _Start = dist.broadcast_object(
        _Start(
            done=len(entries),
            damaged=damaged,
            lengths=[len(sequence) for sequence in tokens or ()],
            stops=stop is not None,
            observed=observer is not None and not observer.is_done(context.work / OBSERVED),
            passing=[part for part in job.plan.passthrough_parts if not _is_written(job, part, context)],
        )
    )
    use_one_arena()
    passing = start.passing if dist.node == 0 else ()
    again = [*start.damaged, *range(start.done if start.observed else 0)]
    with (
        context.streamed(job.opened, parts_of_run(job, start.done, passing, again)) as source,
        ThreadPoolExecutor(max_workers=1) as background,
    ):
        run = _begin(replace(job, source=source), data, tokens, texts, context, start, background, observer)
        _resume(run, start.done, start.damaged, entries)
        quantize_from(run, start.done, entries, stop)
        return _measured(run, entries)


@dataclass(frozen=True)
class _Start:
    """State of a run that begins or resumes, which rank 0 knows and tells all processes.

    Attributes:
        done: finished layers, of which the shards of some are `damaged`.
        lengths: tokens of each calibration sequence.
        stops: whether a layer's figures may stop the run.
        observed: whether an observer has work to do.
        passing: passthrough parts whose shards are to be written.
    """

    done: int
    damaged: Sequence[int]
    lengths: Sequence[int]
    stops: bool
    observed: bool
    passing: Sequence[int | None]


def _begin(
    job: Job,
    data: CalibrationData | None,
    tokens: Sequence[torch.Tensor] | None,
    texts: Sequence[Text],
    context: Context,
    start: _Start,
    background: Executor,
    observer: Observer | None,
) -> Run:
    """Bring all states to where the run begins or resumes, and write what lies outside the layers."""
    dist = context.dist
    outside = load_once(job.opened, [action.source for action in job.plan.of_layer(None)], dist)
    model = StreamedModel(outside, job.facts, context.device, forward_dtype(context.device))
    model.head()  # only to check it: otherwise a NaN in it would be found after the last layer
    quantizer = Quantizer(job, model, context)
    calibration = quantizer.calibration(start.lengths)
    observation = None
    if start.done < job.facts.num_layers or start.damaged or start.observed:
        sequences = _given_to_all(tokens, start.lengths, context)
        embed(model, sequences, calibration.states)
        if observer and start.observed:
            observation = observer.begin(model, sequences, context.work / OBSERVED, context.check, dist)
    source, output, variants = _held_out_streams(quantizer, texts, background)
    # Where layers have limits, a run that stops after one must not have worked on the next.
    behind = not start.stops and (dist.is_distributed or is_accelerator(context.device))
    writer = ShardWriter(dist, background, background=behind)
    run = Run(quantizer, calibration, texts, source, output, variants, writer, observation, data)
    for stream in run.streams:
        stream.enter(start.done, [text.tokens for text in texts])
        if start.done:
            stream.forget(start.done - 1)  # which a kill may have left
    if dist.is_main:
        _write_passthrough(job, outside, start.passing, context)
    for_the_end = outside.only([job.facts.head])  # of the tensors outside the layers only this stays in memory
    for stream in run.streams:
        stream.model.checkpoint = for_the_end
    return run


def _given_to_all(
    tokens: Sequence[torch.Tensor] | None, lengths: Sequence[int], context: Context
) -> Sequence[torch.Tensor]:
    """The calibration token ids (T,) int64 of each sequence in all processes; rank 0 alone is given them."""
    together = torch.cat(list(tokens)) if tokens else torch.empty(sum(lengths), dtype=torch.int64)
    context.dist.broadcast(together)
    return torch.split(together, list(lengths))


def _held_out_streams(
    quantizer: Quantizer, texts: Sequence[Text], background: Executor
) -> tuple[ActivationStream, ActivationStream, Variants]:
    """The held-out texts' states in the source and in the output, as stored and in other computations."""
    job = quantizer.job
    model = quantizer.model
    context = quantizer.context
    folder, lengths = context.work / "held-out", [len(text.tokens) for text in texts]
    if context.dist.is_main:
        folder.mkdir(exist_ok=True)
    numbers = count()

    def new(checkpoint: int, of: StreamedModel) -> ActivationStream:
        return ActivationStream(
            (job.opened.name, "the output")[checkpoint],
            of,
            next(numbers),
            lengths,
            folder,
            durable=True,
            check=context.check,
            dist=context.dist,
            device=context.device if of is model and context.placement.texts_on_device else None,
            writer=background,
        )

    source, output = new(0, model), new(1, model)
    cards = job.as_served if texts else ()
    cached = [1] if texts and job.plan.cached else []
    both = [model.checkpoint, model.checkpoint]  # what lies outside the layers is the same
    return source, output, variants_of(both, job.facts, context.device, model.dtype, cards, cached, new)


def _resume(run: Run, done: int, damaged: Sequence[int], entries: Sequence[LayerEntry]) -> None:
    """Take the calibration states through the finished layers, and make damaged shards again."""
    job = run.job
    context = run.context
    check, dist = context.check, context.dist
    if damaged and context.uploads:
        whole = [entry.file for number, entry in enumerate(entries) if number not in damaged]
        context.upload(*journal.passthrough_shards(context.work), *whole)
        context.uploads.make_room(check)
    followed = done if done < job.facts.num_layers else max(damaged, default=-1) + 1
    if followed:
        with rank_0_progress("resuming", followed, 0, check, dist) as shown:
            for number in range(followed):
                try:
                    if number in damaged:
                        _make_again(run, entries, number)
                    else:
                        _follow(run, number)
                except torch.OutOfMemoryError:
                    raise memory_is_full(number) from None
                release_free_memory()
                shown(f"layer {number}")
    if run.observation and done:
        finished = {number: layer_names(job.opened, job.facts, number) for number in range(done)}
        with (
            rank_0_progress("resuming the source", done, 0, check, dist) as shown,
            walk(job.opened, finished, run.model, check=check, dist=dist) as steps,
        ):
            for step in steps:
                with step.module() as layer:
                    run.observation.add_layer(layer)
                shown(f"layer {step.number}")


def _follow(run: Run, number: int) -> None:
    """Take the calibration states through a finished layer; rank 0 has its shard, here or on the Hub."""
    states = run.calibration.states
    source = run.job.opened
    context = run.context
    loaded = None
    if context.dist.is_main:
        shard = context.work / run.quantizer.shard(number)
        remote = context.uploads.there if context.uploads else None
        tensors = remote.header(shard) if remote else read_header(shard)
        loaded = load_tensors(Checkpoint(shard.parent, source.name, source.config, tensors, remote=remote), tensors)
    with run.model.layer(number, broadcast_tensors(loaded, context.dist)) as layer:
        attend(run.model, layer, states, states, context.check)
        run.quantizer.propagate(layer, states)


def _make_again(run: Run, entries: Sequence[LayerEntry], number: int) -> None:
    """Make a finished layer whose shard was damaged once more; it must get the bytes that the journal has for it."""
    source = run.job.opened
    dist = run.context.dist
    loaded = load_once(source, layer_names(source, run.job.facts, number), dist)
    made = quantize_layer(run, LayerStep(number, loaded, loaded.to(run.model.device), run.model), again=True)
    (written,) = run.writer.finished(pending=0).values()
    if made is not None:
        digest, _ = written
        before = entries[number]
        for same, what in (
            (made.source == before.source, "the source's tensors have"),
            (digest == before.digest, "it gets"),
        ):
            if not same:
                raise QuantizeError(
                    f"layer {number}",
                    f"its damaged shard was made again, but {what} other bytes than the first time",
                    "start over with --fresh",
                )
        print(f"layer {number}: its shard was made again, with the bytes that it had", file=sys.stderr)
        run.context.upload(before.file)  # so that none pile up here before the next layer
    dist.barrier()


def _measured(run: Run, entries: Sequence[LayerEntry]) -> Measured | None:
    """Score the texts, and put all figures together; None without texts, and of no use in other processes."""
    if not run.texts:
        return None
    job = run.job
    dist = run.context.dist
    source = run.source
    output = run.output
    stage = partial(rank_0_progress, check=run.context.check, dist=dist)
    pairs = [(source, source), (source, output), *run.variants.pairs(source)]
    scores = score(pairs, run.texts, stage, dist=dist)
    files, experts = _with_converted(job), job.plan.schemes[0]
    on_cards = run.variants.on_cards(1, source, scores, run.texts, files, experts=experts)
    cache = run.variants.with_cache(1, source, scores, run.texts)
    layers = []
    for entry in entries:
        assert entry.held_out is not None, "the texts went through every layer"
        layers.append(entry.held_out)
    return Measured(scores[source, source][0], *scores[source, output], layers, on_cards, cache)


def _with_converted(job: Job) -> Checkpoint:
    """The source's headers, and those of its converted linear modules instead of their own."""
    made = {
        name: replace(job.opened.tensors[action.source], name=name, dtype=spec.dtype, shape=spec.shape)
        for action in job.plan.actions
        if action.kind == "convert"
        for name, spec in action.outputs.items()
    }
    changed = {action.source for action in job.plan.actions if action.kind in ("convert", "drop")}
    kept = {name: info for name, info in job.opened.tensors.items() if name not in changed}
    return replace(job.opened, tensors=kept | made)


def _is_written(job: Job, part: int | None, context: Context) -> bool:
    """Whether the shard of a passthrough part is written and journaled."""
    shard, uploads = context.work / "output" / job.plan.shard_file(part), context.uploads
    there = shard.exists() or (uploads is not None and shard.name in uploads.shards)
    return journal.passthrough_file(context.work, part).exists() and there


def _write_passthrough(job: Job, outside: LoadedTensors, parts: Sequence[int | None], context: Context) -> None:
    """Write shards that no states go through, and their journal entries.

    Tensors of a layer that predicts further tokens are read here, one layer at a time; those `outside` are given.
    """
    plan, source = job.plan, job.opened
    for part in parts:
        file, shard = journal.passthrough_file(context.work, part), context.work / "output" / plan.shard_file(part)
        actions = plan.of_layer(part)
        if part is not None and part in plan.tables:
            digest = copy_shard(plan, part, source, shard)
            source.release(action.source for action in actions)
        else:
            names = [action.source for action in actions]
            stored = outside if part is None else load_once(source, names, SINGLE_PROCESS)
            kept, linears = kept_hashes(plan, part, stored), converted_tensors(plan, part, stored, torch.device("cpu"))
            tensors = layer_tensors(plan, part, stored, None, made=linears).host
            digest = write_shard(tensors, shard, kept, plan.unread(part))
        write_json(file, {"shard": shard.name, "digest": digest.as_dict(), "audit": written_from(actions).as_dict()})
        context.check()
