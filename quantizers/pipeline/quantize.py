"""Quantizes a checkpoint layer by layer: the loop over the layers, its journal, and what makes each layer.

Calibration states go through the layers beside the held-out texts. Where a layer's first half ends, they are what the
layer is solved from: attention runs once, since quantizing changes nothing before the norm that the experts read.
Statistics come from a forced pass (every expert sees every token); the states that the next layer reads come from
the router's own choice, through the quantized experts, as they will be read from the finished file.

A layer is done once its shard and the held-out states after it are on disk: then its journal entry is written, and
only after that are the states before it removed. A call that resumes first takes the calibration states through the
finished layers, as stored in their shards, with about a twentieth of the operations that quantizing took: these states
are in memory where they fit, else in files that are overwritten in place, and never durable. A shard that was damaged
meanwhile is made again on the way, and must get the bytes that the journal has for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from quantizers.architectures.attention import keys_and_values
from quantizers.calibration.samples import CalibrationData, category_names
from quantizers.checkpoint.loaded_tensors import (
    LoadedTensors,
    broadcast_tensors,
    layer_names,
    load_once,
    load_tensors,
    tensors_in_memory,
)
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import read_header
from quantizers.device.devices import forward_dtype, is_accelerator, release_free_memory, use_one_arena
from quantizers.device.prefetch import PinnedBuffers, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.eval.fidelity.as_served import ServedModel, ServedTexts, as_served, kernels_of, pairs
from quantizers.eval.fidelity.comparison import Comparison
from quantizers.eval.fidelity.kv_cache import KINDS, WITH_ONES, CachedModel, kv_figures
from quantizers.eval.fidelity.metrics import Measured, Text
from quantizers.eval.fidelity.scoring import score
from quantizers.eval.serving.cards import Kind
from quantizers.importance.input_sums import InputSums, sums_file
from quantizers.layers.context import Context
from quantizers.layers.loop import LayerStep, all_tensors, device_memory_errors, layer_steps, run_step
from quantizers.model.activation_store import ActivationStore
from quantizers.model.activation_stream import ActivationStream, embed
from quantizers.model.kv_cache import Peaks, scales_of
from quantizers.model.layer_forward import attend, finish, observe, run_whole
from quantizers.model.layer_weights import ExpertWeights
from quantizers.model.moe_inputs import MoeInputStore, moe_input_store, route_counts
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.output import journal
from quantizers.planning.device_memory import Place
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.planning.job import Job, parts_of_run
from quantizers.recipe.schema import Stop
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve_layer
from quantizers.stitch.audit.layer import LayerAudit, audit_layer, written_from
from quantizers.stitch.write.shard import LayerTensors, converted_tensors, kept_hashes, layer_tensors, write_shard
from quantizers.system.errors import QuantizeError
from quantizers.system.files import write_json
from quantizers.system.progress import doing, forecast, peak_memory, progress

from .layer_entry import Entry, Written, layer_note, of_shard, of_solution, refuse_layer
from .shard_writer import ShardWriter

IMATRIX = "imatrix"  # folder of a run's sums for an importance matrix, see importance/input_sums.py


def quantize_layers(
    job: Job,
    data: CalibrationData | None,
    tokens: Sequence[torch.Tensor] | None,
    context: Context,
    texts: Sequence[Text] = (),
    *,
    damaged: Sequence[int] = (),
    stop: Stop | None = None,
    imatrix: bool = False,
) -> Measured | None:
    """Write all shards, with a journal entry for each, under the context's `work`; measure them on the way.

    All processes of a run call this; rank 0 alone knows what to do, and keeps the journal.

    Args:
        data, tokens: the calibration samples, and their token ids (T,) int64; None in all ranks except 0.
        context: its `work` holds `layers/` and `output/`; layers that have a journal entry there are not made again.
        damaged: finished layers whose shards must be made again.
        stop: the figures of a layer after which the run stops.
        imatrix: take the calibration samples through the source's layers too, for `IMATRIX`.

    Returns:
        What the output does with the texts, compared with the source; None without texts, and of no use in ranks
        except 0.

    Raises:
        QuantizeError: a layer's output is not finite, or disk or device memory is full.
        Stopped: a layer's figures are beyond `stop`.
    """
    dist, folder = context.dist, context.work / IMATRIX
    entries = journal.done_layers(context.work, job.facts.num_layers) if dist.is_main else []
    for entry in entries:
        refuse_layer(entry, stop)
    done, damaged, lengths, stops, summing, passing = dist.broadcast_object(
        (
            len(entries),
            damaged,
            [len(sequence) for sequence in tokens or ()],
            stop is not None,
            imatrix and not sums_file(folder, None).exists(),
            [part for part in job.plan.passthrough_parts if not _is_written(job, part, context)],
        )
    )
    use_one_arena()
    parts = parts_of_run(job, done, passing if dist.node == 0 else (), [*damaged, *range(done if summing else 0)])
    with context.streamed(job.opened, parts) as source, ThreadPoolExecutor(max_workers=1) as background:
        run = _Run(replace(job, source=source), context, texts, lengths, background, stops=stops)
        if done < job.facts.num_layers or damaged or summing:
            sequences = run.embed(tokens)
            if summing:
                run.sums = InputSums(run.model, sequences, folder, "both", context.check, dist)
        run.begin(done, passing)
        run.resume(done, damaged, entries)
        run.quantize(done, data, entries, stop)
        return run.measured(entries)


class Quantizer:
    """Makes, from each of the source's layers, the quantized one: a candidate of `eval.fidelity.comparison`.

    By itself it writes nothing, and makes a layer only when its texts pass through it, so that layers of several of
    these are not in memory together. `states` and `moe_inputs` are for subclasses to make and to remove.

    Args:
        stream: its held-out states.
        lengths: calibration tokens of each sequence.

    Attributes:
        states: the calibration states between the layers.
        moe_inputs: what the experts of the last layer were called with.
        made: the tensors of the layer that was made last; with `reread` until the next one, else until they are read.
        early: whether a layer is made from the source's module, before its texts pass through it.
    """

    states: ActivationStore
    moe_inputs: MoeInputStore
    made: LoadedTensors
    reread = early = False

    def __init__(
        self, job: Job, model: StreamedModel, stream: ActivationStream, context: Context, lengths: Sequence[int]
    ) -> None:
        self.job, self.model, self.stream, self.context, self.lengths = job, model, stream, context, lengths
        self._packed = PinnedBuffers(model.device)  # a process has two shards on their way at most
        self._solved: Entry = {}
        self._peaks: list[float] = []  # of the keys and of the values of the layer that was observed last

    def rows(
        self, place: Place, name: str, width: int, dtype: torch.dtype, dist: ProcessGroup = SINGLE_PROCESS
    ) -> ActivationStore:
        """Room for rows of all sequences."""
        context, device = self.context, self.model.device
        rank = "" if context.dist.is_main else f"-{context.dist.rank}"
        path = context.work / f"{name}{rank}.bin" if place == "files" else None
        chunk = tokens_per_chunk(is_accelerator(device))
        on = device if place == "device" else None
        made = ActivationStore(path, self.lengths, width, dtype, on, dist=dist, chunk=chunk)
        if place == "memory":
            pin(made.flat, device)
        return made

    def new_inputs(self) -> MoeInputStore:
        """Room for what the experts of a layer are called with."""
        return moe_input_store(partial(self.rows, self.context.inputs), self.job.facts, self.model.dtype)

    def prepare(self, step: LayerStep, layer: DecoderLayer) -> None:
        """Make the quantized layer, if it is made early."""
        if self.early:
            self._make(step, layer, step.on_device, {})

    def _make_later(self, step: LayerStep) -> None:
        """Make the layer, without the source's module, behind the output's attention, from which experts are solved."""
        plan, number = self.job.plan, step.number
        linears = converted_tensors(plan, number, step.on_device, self.model.device)
        others = {
            action.source: step.on_device.tensor(action.source)
            for action in plan.of_layer(number)
            if action.kind != "convert" and (action.kind != "drop" or action.expert is not None)
        }
        stored = tensors_in_memory(step.on_device, others | linears, step.on_device.folder)
        with self.model.layer(number, stored, experts=False) as layer:
            self._make(step, layer, stored, linears)

    def _make(
        self, step: LayerStep, layer: DecoderLayer, stored: LoadedTensors, linears: Mapping[str, torch.Tensor]
    ) -> None:
        """Observe, solve and pack the layer. A layer without experts is not solved.

        Args:
            stored: the layer's tensors on the device, with its experts as in the source.
            linears: those among them that were converted.
        """
        job, model, context, number = self.job, self.model, self.context, step.number
        doing("attention")
        settings = job.plan.settings(number)
        library = settings.engine == "llmcompressor"
        entering = [self.states[i].clone() for i in range(len(self.states))] if library else []
        made = {**linears, **self._observe(number, layer)}
        if number in job.facts.dense:
            self._pack(step, None, made)
            return
        step.watch.lap("observe")
        weights = ExpertWeights(stored, job.facts, number, model.device, model.dtype)
        norm = job.facts.norm if job.plan.folds else None
        with model.layer(number, stored) if library else contextlib.nullcontext(layer) as whole:
            solved = solve_layer(
                model,
                whole,
                stored.tensor(job.facts.layer(number, norm.tensor)) if norm else None,
                self.moe_inputs,
                settings,
                weights=weights.batch,
                residents=context.residents,
                entering=entering,
                check=context.check,
                dist=context.dist,
            )
        weights.require_finite()
        del entering
        step.watch.lap("solve")
        self._pack(step, solved, made)

    def _observe(self, number: int, layer: DecoderLayer) -> dict[str, torch.Tensor]:
        """Take the states through the layer's first half, and capture what its experts are called with.

        Returns:
            The scales of its FP8 cache by name, if it gets any.
        """
        model, states, check, peaks = self.model, self.states, self.context.check, Peaks()
        names = self.job.plan.kv_scales(number)
        with keys_and_values(layer.module, peaks.see) if names else contextlib.nullcontext():
            if number not in self.job.facts.dense:
                observe(model, layer, states, self.moe_inputs, check)
            elif layer.halves or not names:
                attend(model, layer, states, states, check)
            else:
                run_whole(model, layer, states, check)
        if not names:
            return {}
        largest = peaks.of_all(self.context.dist, model.device)
        self._peaks = largest.tolist()
        return dict(zip(names, scales_of(largest).split(1), strict=True))

    def _pack(
        self, step: LayerStep, solved: LayerResult | None, made: Mapping[str, torch.Tensor], *, written: bool = False
    ) -> LayerTensors:
        """Pack a layer, without experts if nothing was solved.

        Args:
            made: its tensors that were neither solved nor kept.
            written: whether this process writes them.
        """
        plan, number, source = self.job.plan, step.number, step.source
        doing("packing")
        tensors = layer_tensors(
            plan, number, source, solved, made=made, near=step.on_device, buffers=self._packed, written=written
        )
        path = self.context.work / "output" / plan.shard_file(number)
        self.made = tensors_in_memory(source, tensors.device, path)
        self._solved = of_solution(solved) | ({"kv_peaks": self._peaks} if plan.kv_scales(number) else {})
        return tensors

    @contextlib.contextmanager
    def layer(self, step: LayerStep) -> Iterator[DecoderLayer]:
        """The quantized layer, read from the tensors that are being written; calibration passes through it first."""
        if not self.early:
            self._make_later(step)
        with self.model.layer(step.number, self.made) as layer:
            if not self.reread:
                del self.made
            step.watch.lap("materialise")
            doing("calibration pass")
            self._finish(step.number, layer)
            step.watch.lap("propagate")
            yield layer

    def _finish(self, number: int, layer: DecoderLayer) -> None:
        finish(self.model, layer, self.states, f"layer {number}", self.context.check)

    def routed(self, data: CalibrationData, number: int) -> list[list[int]]:
        """Tokens routed to each expert of the layer that was solved last: a row per category, see `category_names`.

        A layer without experts has no rows.
        """
        if number in self.job.facts.dense:
            return []
        names = category_names(data.samples)
        counts = torch.zeros(len(names), self.job.facts.num_experts, dtype=torch.int64)
        chosen = self.moe_inputs.chosen.flat.cpu().split(self.states.lengths)
        for sample, experts in zip(data.samples, chosen, strict=True):
            counts[names.index(sample.category)] += route_counts(experts.long(), counts.shape[1])
        rows: list[list[int]] = counts.tolist()
        return rows


class _Run(Quantizer):
    """The quantizer of a run in one process, with its models, states and consumers: its shards are written.

    Args:
        lengths: tokens of each calibration sequence.
        background: one thread, which writes shards and held-out states.
        stops: whether layers have limits: then a run that stops after one has not worked on the next.

    Attributes:
        sums: the calibration samples in the source, for an importance matrix; None without one.
    """

    sums: InputSums | None = None

    def __init__(
        self,
        job: Job,
        context: Context,
        texts: Sequence[Text],
        lengths: Sequence[int],
        background: Executor,
        *,
        stops: bool,
    ) -> None:
        self.texts, dist = texts, context.dist
        outside = load_once(job.opened, [action.source for action in job.plan.of_layer(None)], dist)
        own = outside, job.facts, context.device
        model = StreamedModel(*own, forward_dtype(context.device))
        model.head()  # only to check it: otherwise a NaN in it would be found after the last layer
        folder = context.work / "held-out"
        if dist.is_main:
            folder.mkdir(exist_ok=True)
        device = context.device if context.texts_on_device else None
        new = partial(ActivationStream, durable=True, check=context.check, dist=dist, writer=background)
        cards = job.recipe.as_served if texts else ()
        kinds = KINDS if texts and job.plan.cached else ()
        self.cached = [CachedModel(*own, model.dtype, ones=kind == WITH_ONES) for kind in kinds]
        self.models = [model, *(ServedModel(*own, card) for card in cards), *self.cached]
        of_texts, names = [len(text.tokens) for text in texts], (job.opened.name, "the output")
        streamed = [(name, model) for model in self.models[: 1 + len(cards)] for name in names]
        streamed += [(names[1], model) for model in self.cached]
        self.streams = [
            new(name, one, number, of_texts, folder, device=device if one is model else None)
            for number, (name, one) in enumerate(streamed)
        ]
        super().__init__(job, model, self.streams[1], context, lengths)
        self.states = self.rows(context.states, "states", model.row_width, model.dtype, dist)
        self.moe_inputs = self.new_inputs()
        self.early, self.reread = job.plan.attention == "keep", len(self.streams) > 2
        behind = not stops and (dist.is_distributed or is_accelerator(context.device))
        self.writer = ShardWriter(dist, background, background=behind)
        self.comparison = Comparison(self.streams[0], [self], texts, dist)
        files: list[Callable[[LayerStep], Checkpoint]] = [lambda step: step.on_device, lambda _: self.made]
        self.served = ServedTexts(self.streams[2:], [*files * len(cards), *files[1:] * len(kinds)])

    def embed(self, tokens: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
        """Fill the states that enter layer 0 from token ids (T,) int64, which rank 0 alone gives; all get them."""
        together = torch.cat(list(tokens)) if tokens else torch.empty(sum(self.lengths), dtype=torch.int64)
        self.context.dist.broadcast(together)
        sequences = torch.split(together, list(self.lengths))
        embed(self.model, sequences, self.states)
        return sequences

    def begin(self, done: int, passing: Sequence[int | None]) -> None:
        """Take up the texts after `done` layers, and write these passthrough shards.

        Of the tensors outside the layers only what the end needs stays in memory.
        """
        for stream in self.streams:
            if done == 0:
                stream.embed([text.tokens for text in self.texts])
            else:
                stream.resume(done)
                stream.forget(done - 1)  # which a kill may have left
        outside = self.model.checkpoint
        assert isinstance(outside, LoadedTensors)
        if self.context.dist.is_main:
            _write_passthrough(self.job, outside, passing, self.context)
        for model in self.models:
            model.checkpoint = outside.only([self.job.facts.head])

    def resume(self, done: int, damaged: Sequence[int], entries: Sequence[Entry]) -> None:
        """Take the calibration states through the finished layers, and make damaged ones again."""
        job, context, check, dist = self.job, self.context, self.context.check, self.context.dist
        if damaged and context.uploads:
            whole = [entry for number, entry in enumerate(entries) if number not in damaged]
            context.upload(*journal.passthrough_entries(context.work), *whole)
            context.uploads.make_room(check)
        followed = done if done < job.facts.num_layers else max(damaged, default=-1) + 1
        if followed:
            with rank_0_progress("resuming", followed, 0, check, dist) as shown:
                for number in range(followed):
                    with device_memory_errors(number):
                        if number in damaged:
                            self._make_again(entries, number)
                        else:
                            self._follow(number)
                    release_free_memory()
                    shown(f"layer {number}")
        if self.sums and done:
            finished = {number: layer_names(job.opened, job.facts, number) for number in range(done)}
            with rank_0_progress("resuming the source", done, 0, check, dist) as shown:
                for step in layer_steps(job.opened, finished, [self.sums], self.model, check=check, dist=dist):
                    shown(f"layer {step.number}")

    def _follow(self, number: int) -> None:
        """Take the calibration states through a finished layer; rank 0 has its shard, here or on the Hub."""
        loaded, source, context, dist = None, self.job.opened, self.context, self.context.dist
        if dist.is_main:
            shard = context.work / "output" / self.job.plan.shard_file(number)
            remote = context.uploads.there if context.uploads else None
            tensors = remote.header(shard) if remote else read_header(shard)
            loaded = load_tensors(Checkpoint(shard.parent, source.name, source.config, tensors, remote=remote), tensors)
        with self.model.layer(number, broadcast_tensors(loaded, dist)) as layer:
            attend(self.model, layer, self.states, self.states, context.check)
            self._finish(number, layer)

    def _make_again(self, entries: Sequence[Entry], number: int) -> None:
        source, context, dist = self.job.opened, self.context, self.context.dist
        loaded = load_once(source, layer_names(source, self.job.facts, number), dist)
        step = LayerStep(number, loaded, loaded.to(self.model.device))
        run_step(step, self.model, [Comparison(self.streams[0], [self], (), dist)])
        (shard,) = self.writer.finished(pending=0).values()
        if dist.is_main:
            made = self._entry(step) | of_shard(shard)
            for key, what in (("source", "the source's tensors have"), ("digest", "it gets")):
                if made[key] != entries[number][key]:
                    raise QuantizeError(
                        f"layer {number}: its damaged shard was made again, but {what} other bytes than the first "
                        "time; start over with --fresh"
                    )
            print(f"layer {number}: its shard was made again, with the bytes that it had", file=sys.stderr)
            context.upload(entries[number])  # so that none pile up here before the next layer
        dist.barrier()

    def _pack(
        self, step: LayerStep, solved: LayerResult | None, made: Mapping[str, torch.Tensor], *, written: bool = False
    ) -> LayerTensors:
        """Pack a layer, and let its shard be audited and written if it is this process's turn."""
        job, number, source, writer = self.job, step.number, step.source, self.writer
        tensors = super()._pack(step, solved, made, written=writer.has_turn(number))
        if writer.has_turn(number):
            host = tensors.host
            if writer.pending:  # the source's memory gets other bytes before the shard is on disk
                host = {name: tensor.clone() if source.holds(tensor) else tensor for name, tensor in host.items()}
            path = self.context.work / "output" / job.plan.shard_file(number)
            writer.begin(
                number,
                partial(_audit_shard, job, number, step.on_device, self.made, self.context.device),
                partial(write_shard, host, path, kept_hashes(job.plan, number, source), job.plan.unread(number)),
            )
        else:
            writer.skip(number)
        step.watch.lap("pack")
        return tensors

    def _entry(self, step: LayerStep) -> Entry:
        """The journal's entry of a layer after its step, as far as it is known before its shard is on disk."""
        return {
            "layer": step.number,
            "shard": self.job.plan.shard_file(step.number),
            "source": step.source.digest(),
            "seconds": step.watch.seconds,
            "proof": step.proof,
            **self._solved,
        }

    def quantize(self, done: int, data: CalibrationData | None, entries: list[Entry], stop: Stop | None) -> None:
        """The loop over the layers that are left; rank 0 adds the entry of each one that is done to `entries`."""
        job, context, begun = self.job, self.context, dict[int, Entry]()  # begun: shards are not on disk yet
        layers, dist = job.facts.num_layers, context.dist
        context.upload(*journal.passthrough_entries(context.work), *entries)  # unless an earlier call did
        say_forecast, tensors, early = forecast(layers), all_tensors(job, job.opened, done), context.prefetch_to_device
        consumers = [*([self.sums] if self.sums else []), self.comparison, self.served]
        steps = layer_steps(job.opened, tensors, consumers, self.model, check=context.check, dist=dist, early=early)
        shown = progress("quantizing", layers, done, "layer", trusted=1, kept=True, silent=not dist.is_main)

        def journal_them(shards: dict[int, Written]) -> None:
            for number, shard in shards.items():
                entry = begun.pop(number, None)  # which rank 0 alone has
                if entry is not None:
                    entry |= of_shard(shard)
                    for stream in self.streams:
                        stream.on_disk(number + 1)  # from there a run resumes once the layer is journaled
                    write_json(journal.layer_file(context.work, number), entry)
                    entries.append(entry)
                for stream in self.streams:
                    stream.forget(number)
                if entry is not None:
                    show(layer_note(entry))
                    say_forecast(entry)
                    context.upload(entry)
                    refuse_layer(entry, stop)

        with shown as show, contextlib.closing(steps):
            for step in steps:
                with device_memory_errors(step.number):  # of the audit, which ran beside the step
                    doing("audit")
                    shards = self.writer.finished()
                    step.watch.lap("write")
                if data is not None:
                    begun[step.number] = self._entry(step) | {
                        "routed": self.routed(data, step.number),
                        "held_out": self.comparison.found[0] if self.comparison.found else None,
                        "peak_memory_bytes": peak_memory(context.device),
                    }
                journal_them(shards)
            for states in (self.states, self.moe_inputs):
                states.remove()  # their files, if there are any
            if self.sums:
                self.sums.end()
            journal_them(self.writer.finished(pending=0))

    def measured(self, entries: Sequence[Entry]) -> Measured | None:
        """Score the texts, and put all figures together; None without texts, and of no use in other processes."""
        if not self.texts:
            return None
        stage = partial(rank_0_progress, check=self.context.check, dist=self.context.dist)
        served = [model for model in self.models if isinstance(model, ServedModel)]
        cards, compared = [model.card for model in served], pairs(2, len(served))
        with_cache = [(0, number) for number in range(len(self.streams) - len(self.cached), len(self.streams))]
        scores = score(self.streams, self.texts, stage, dist=self.context.dist, pairs=[*compared, *with_cache])
        scheme = self.job.plan.schemes[0]
        kind: Kind = "packed"
        if scheme.format == "nvfp4":
            kind = "nvfp4-a4" if scheme.activations == 4 else "nvfp4"
        kernels = {model.card: kernels_of(model, _with_converted(self.job), kind) for model in served}
        (on_cards,) = as_served(scores[: len(compared)], 2, cards, self.texts, [kernels])
        source, output = scores[:2]
        cache = kv_figures(scores[len(compared) :], source, self.texts) if self.cached else None
        return Measured(source[0], *output, [entry["held_out"] for entry in entries], on_cards, cache)


def _with_converted(job: Job) -> Checkpoint:
    """The source's headers, and those of its converted linear modules instead of their own."""
    made = {
        name: replace(job.opened.tensors[action.source], name=name, dtype=spec.dtype, shape=spec.shape)
        for action in job.plan.actions
        if action.kind == "convert"
        for name, spec in action.outputs.items()
    }
    return replace(job.opened, tensors=job.opened.tensors | made)


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
        stored = outside if part is None else load_once(source, [action.source for action in actions], SINGLE_PROCESS)
        kept, linears = kept_hashes(plan, part, stored), converted_tensors(plan, part, stored, torch.device("cpu"))
        tensors = layer_tensors(plan, part, stored, None, made=linears).host
        digest = write_shard(tensors, shard, kept, plan.unread(part))
        write_json(file, {"shard": shard.name, "digest": digest, "audit": written_from(actions).as_dict()})
        context.check()


def _audit_shard(job: Job, number: int, source: LoadedTensors, made: LoadedTensors, device: torch.device) -> LayerAudit:
    """Compare what is going to be in a layer's file with the source."""
    audit = written_from(job.plan.of_layer(number))
    bits = job.plan.schemes[number].bits
    audit_layer(number, job.facts, source, made, bits=bits, device=device, audit=audit)
    return audit
