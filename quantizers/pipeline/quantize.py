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
from itertools import product

import torch

from eval.fidelity.as_served import ServedModel, ServedTexts, as_served, kernels_of, pairs
from eval.fidelity.comparison import Comparison
from eval.fidelity.kv_cache import KINDS, WITH_ONES, CachedModel, kv_figures
from eval.fidelity.metrics import Measured, Text
from eval.fidelity.scoring import score
from eval.serving.cards import Kind
from quantizers.architectures.attention import keys_and_values
from quantizers.calibration.samples import CalibrationData, category_names
from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, load_once, tensors_in_memory
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import forward_dtype, is_accelerator, use_one_arena
from quantizers.device.prefetch import PinnedBuffers, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.importance.input_sums import InputSums, sums_file
from quantizers.layers.context import Context
from quantizers.layers.loop import (
    LayerStep,
    all_tensors,
    device_memory_errors,
    finished_shard,
    layer_steps,
    resume_layers,
    run_step,
)
from quantizers.layers.writer import ShardWriter
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
from quantizers.system.errors import QuantizeError
from quantizers.system.files import write_json
from quantizers.system.progress import doing, forecast, peak_memory, progress
from stitch.audit.layer import LayerAudit, audit_layer, written_from
from stitch.write.shard import ShardDigest, converted_tensors, kept_hashes, layer_tensors, write_shard

from .layer_entry import Entry, Written, layer_note, of_shard, of_solution, refuse_layer

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
    dist = context.dist
    entries = journal.done_layers(context.work, job.sizes["layers"]) if dist.is_main else []
    for entry in entries:
        refuse_layer(entry, stop)
    lengths = [len(sequence) for sequence in tokens or ()]
    done, damaged, lengths, stops = dist.broadcast_object((len(entries), damaged, lengths, stop is not None))
    folder = context.work / IMATRIX
    summing = dist.broadcast_object(imatrix and not sums_file(folder, None).exists())
    passing = dist.broadcast_object(
        [part for part in job.plan.passthrough_parts if not _is_written(job, part, context)]
    )
    use_one_arena()
    parts = parts_of_run(job, done, passing if dist.node == 0 else (), [*damaged, *range(done if summing else 0)])
    with context.streamed(job.opened, parts) as source, ThreadPoolExecutor(max_workers=1) as background:
        run = _Run(replace(job, source=source), context, texts, lengths, background, stops=stops)
        if done < job.sizes["layers"] or damaged or summing:
            sequences = run.quantizer.embed(tokens)
            if summing:
                run.sums = InputSums(run.model, sequences, folder, "both", context.check, dist)
        run.begin(done, passing)
        run.resume(done, damaged, entries)
        run.quantize(done, data, entries, stop)
        return run.measured(entries)


class _Run:
    """The models, states and consumers of one process.

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
        self.job, self.context, self.texts, dist = job, context, texts, context.dist
        outside = load_once(job.opened, [action.source for action in job.plan.of_layer(None)], dist)
        self.model = StreamedModel(outside, job.facts, job.sizes, context.device, forward_dtype(context.device))
        self.model.head()  # only to check it: otherwise a NaN in it would be found after the last layer
        folder = context.work / "held-out"
        if dist.is_main:
            folder.mkdir(exist_ok=True)
        device = context.device if context.texts_on_device else None
        new = partial(ActivationStream, durable=True, check=context.check, dist=dist, writer=background)
        cards = job.recipe.as_served if texts else ()
        own = outside, job.facts, job.sizes, context.device
        self.models: list[StreamedModel] = [self.model]
        self.models += [ServedModel(*own, card) for card in cards]
        kinds = KINDS if texts and job.plan.cached else ()
        self.cached = [CachedModel(*own, self.model.dtype, ones=kind == WITH_ONES) for kind in kinds]
        of_texts, names = [len(text.tokens) for text in texts], (job.opened.name, "the output")
        self.streams = [
            new(name, model, number, of_texts, folder, device=device if model is self.model else None)
            for number, (model, name) in enumerate(product(self.models, names))
        ]
        self.streams += [
            new(names[1], model, number, of_texts, folder)
            for number, model in enumerate(self.cached, len(self.streams))
        ]
        self.models += self.cached
        behind = not stops and (dist.is_distributed or is_accelerator(context.device))
        self.writer: ShardWriter[ShardDigest, LayerAudit] = ShardWriter(dist, background, background=behind)
        self.quantizer = Quantizer(
            job, self.model, self.streams[1], context, lengths, writer=self.writer, reread=len(self.streams) > 2
        )
        self.comparison = Comparison(self.streams[0], [self.quantizer], texts, dist)
        files: list[Callable[[LayerStep], Checkpoint]] = [lambda step: step.on_device, lambda _: self.quantizer.made]
        self.served = ServedTexts(self.streams[2:], [*files * len(cards), *files[1:] * len(kinds)])

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
        job, context = self.job, self.context
        if damaged and context.uploads:
            whole = [entry for number, entry in enumerate(entries) if number not in damaged]
            context.upload(*journal.passthrough_entries(context.work), *whole)
            context.uploads.make_room(context.check)
        resume_layers(
            done if done < job.sizes["layers"] else max(damaged, default=-1) + 1,
            damaged,
            follow=lambda number: self.quantizer.follow(
                number, finished_shard(job.opened, context.work / "output" / job.plan.shard_file(number), context)
            ),
            make_again=partial(self._make_again, entries),
            check=context.check,
            dist=context.dist,
        )
        if self.sums and done:
            finished = {number: layer_names(job.opened, job.facts, number) for number in range(done)}
            steps = layer_steps(job.opened, finished, [self.sums], self.model, check=context.check, dist=context.dist)
            with rank_0_progress("resuming the source", done, 0, context.check, context.dist) as shown:
                for step in steps:
                    shown(f"layer {step.number}")

    def _make_again(self, entries: Sequence[Entry], number: int) -> None:
        source, context, dist = self.job.opened, self.context, self.context.dist
        loaded = load_once(source, layer_names(source, self.job.facts, number), dist)
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
            context.upload(entries[number])  # so that none pile up here before the next layer
        dist.barrier()

    def quantize(self, done: int, data: CalibrationData | None, entries: list[Entry], stop: Stop | None) -> None:
        """The loop over the layers that are left; rank 0 adds the entry of each one that is done to `entries`."""
        job, context, begun = self.job, self.context, dict[int, Entry]()  # begun: shards are not on disk yet
        layers, dist = job.sizes["layers"], context.dist
        context.upload(*journal.passthrough_entries(context.work), *entries)  # unless an earlier call did
        say_forecast = forecast(layers)
        steps = layer_steps(
            job.opened,
            all_tensors(job, job.opened, done),
            [*([self.sums] if self.sums else []), self.comparison, self.served],
            self.model,
            check=context.check,
            dist=dist,
            early=context.prefetch_to_device,
        )
        shown = progress("quantizing", layers, done, "layer", trusted=1, kept=True) if dist.is_main else None

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

        with shown or contextlib.nullcontext(lambda _: None) as show, contextlib.closing(steps):
            for step in steps:
                with device_memory_errors(step.number):  # of the audit, which ran beside the step
                    doing("audit")
                    shards = self.writer.finished()
                    step.watch.lap("write")
                if data is not None:
                    begun[step.number] = self.quantizer.entry(step) | {
                        "routed": self.quantizer.routed(data, step.number),
                        "held_out": self.comparison.found[0] if self.comparison.found else None,
                        "peak_memory_bytes": peak_memory(context.device),
                    }
                journal_them(shards)
            for states in (self.quantizer.states, self.quantizer.moe_inputs):
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
        first = len(self.streams) - len(self.cached)
        with_cache = [(0, number) for number in range(first, len(self.streams))]
        scores = score(self.streams, self.texts, stage, dist=self.context.dist, pairs=[*compared, *with_cache])
        (on_cards,) = as_served(scores[: len(compared)], 2, cards, self.texts)
        for model in served:
            on_cards[model.card]["kernels"] = kernels_of(model, _with_converted(self.job), self._experts_kind())
        source, output = scores[:2]
        cache = kv_figures(scores[len(compared) :], source, self.texts) if self.cached else {}
        return Measured(source[0], *output, [entry["held_out"] for entry in entries], on_cards, cache)

    def _experts_kind(self) -> Kind:
        scheme = self.job.plan.schemes[0]
        if scheme.format == "nvfp4":
            return "nvfp4-a4" if scheme.activations == 4 else "nvfp4"
        return "packed"


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
    shard = context.work / "output" / job.plan.shard_file(part)
    there = shard.exists() or shard.name in context.uploaded
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


class Quantizer:
    """Makes, from each of the source's layers, the quantized one: a candidate of `eval.fidelity.comparison`.

    Args:
        stream: its held-out states.
        lengths: calibration tokens of each sequence.
        writer: writes and audits shards in the background; None to write nothing, and to make a layer only when its
            texts pass through it, so that layers of several of these are not in memory together.
        reread: whether a layer's tensors are read again after it.
        states: instead of new ones.

    Attributes:
        states: the calibration states between the layers.
        moe_inputs: what the experts of the last layer were called with; without a writer, the caller's to make and
            remove.
        made: the tensors of the layer that was made last; with `reread` until the next one, else until they are read.
    """

    made: LoadedTensors
    moe_inputs: MoeInputStore

    def __init__(
        self,
        job: Job,
        model: StreamedModel,
        stream: ActivationStream,
        context: Context,
        lengths: Sequence[int],
        *,
        writer: ShardWriter[ShardDigest, LayerAudit] | None = None,
        reread: bool = False,
        states: ActivationStore | None = None,
    ) -> None:
        self.job, self.model, self.stream, self.context, self.writer = job, model, stream, context, writer
        self._reread = reread
        chunk = tokens_per_chunk(is_accelerator(model.device))

        def rows(
            place: Place, name: str, width: int, dtype: torch.dtype, dist: ProcessGroup = SINGLE_PROCESS
        ) -> ActivationStore:
            rank = "" if context.dist.is_main else f"-{context.dist.rank}"
            path = context.work / f"{name}{rank}.bin" if place == "files" else None
            device = model.device if place == "device" else None
            made = ActivationStore(path, lengths, width, dtype, device, dist=dist, chunk=chunk)
            if place == "memory":
                pin(made.flat, model.device)
            return made

        new = partial(rows, context.states, "states", model.row_width, model.dtype, context.dist)
        self.states = new() if states is None else states
        self.new_inputs = partial(moe_input_store, partial(rows, context.inputs), job.sizes, model.dtype)
        if writer:
            self.moe_inputs = self.new_inputs()
        self._packed = PinnedBuffers(model.device)  # a process has two shards on their way at most
        self._solved: Entry = {}
        self._peaks: list[float] = []  # of the keys and of the values of the layer that was observed last

    def embed(self, tokens: Sequence[torch.Tensor] | None) -> Sequence[torch.Tensor]:
        """Fill the states that enter layer 0 from token ids (T,) int64, which rank 0 alone gives; all get them."""
        lengths = self.states.lengths
        together = torch.cat(list(tokens)) if tokens else torch.empty(sum(lengths), dtype=torch.int64)
        self.context.dist.broadcast(together)
        sequences = torch.split(together, lengths)
        embed(self.model, sequences, self.states)
        return sequences

    def prepare(self, step: LayerStep, layer: DecoderLayer) -> None:
        """Make the quantized layer, unless its attention is another than the source's, or nothing is written: then
        `layer` does.
        """
        if self.writer and self.job.plan.attention == "keep":
            self._make(step, layer, step.on_device, {})

    def _make_later(self, step: LayerStep) -> None:
        """The same once the source's module is freed, behind the output's attention, from which experts are solved."""
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
        """Observe and solve the layer, and begin to write it. A layer without experts is only written.

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
        if number in job.sizes.dense:
            self._begin_writing(step, None, made)
            return
        step.watch.lap("observe")
        weights = ExpertWeights(stored, job.facts, job.sizes, number, model.device, model.dtype)
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
        self._begin_writing(step, solved, made)

    def _observe(self, number: int, layer: DecoderLayer) -> dict[str, torch.Tensor]:
        """Take the states through the layer's first half, and capture what its experts are called with.

        Returns:
            The scales of its FP8 cache by name, if it gets any.
        """
        model, states, check, peaks = self.model, self.states, self.context.check, Peaks()
        names = self.job.plan.kv_scales(number)
        with keys_and_values(layer.module, peaks.see) if names else contextlib.nullcontext():
            if number not in self.job.sizes.dense:
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

    def _begin_writing(self, step: LayerStep, solved: LayerResult | None, made: Mapping[str, torch.Tensor]) -> None:
        """Pack a layer, without experts if nothing was solved; let its shard be audited and written in its turn.

        Args:
            made: its tensors that were neither solved nor kept.
        """
        job, number, source, writer = self.job, step.number, step.source, self.writer
        path = self.context.work / "output" / job.plan.shard_file(number)
        doing("packing")
        tensors = layer_tensors(
            job.plan,
            number,
            source,
            solved,
            made=made,
            near=step.on_device,
            buffers=self._packed,
            written=writer is not None and writer.has_turn(number),
        )
        self.made = in_memory = tensors_in_memory(source, tensors.device, path)
        self._solved = of_solution(solved) | ({"kv_peaks": self._peaks} if job.plan.kv_scales(number) else {})
        if writer and writer.has_turn(number):
            host = tensors.host
            if writer.pending:  # the source's memory gets other bytes before the shard is on disk
                host = {name: tensor.clone() if source.holds(tensor) else tensor for name, tensor in host.items()}
            writer.begin(
                number,
                partial(_audit_shard, job, number, step.on_device, in_memory, self.context.device),
                partial(write_shard, host, path, kept_hashes(job.plan, number, source), job.plan.unread(number)),
            )
        elif writer:
            writer.skip(number)
        step.watch.lap("pack")

    @contextlib.contextmanager
    def layer(self, step: LayerStep) -> Iterator[DecoderLayer]:
        """The quantized layer, read from the tensors that are being written; calibration passes through it first."""
        if not self.writer or self.job.plan.attention != "keep":
            self._make_later(step)
        with self.model.layer(step.number, self.made) as layer:
            if not self._reread:
                del self.made
            step.watch.lap("materialise")
            doing("calibration pass")
            self._finish(step.number, layer)
            step.watch.lap("propagate")
            yield layer

    def _finish(self, number: int, layer: DecoderLayer) -> None:
        finish(self.model, layer, self.states, f"layer {number}", self.context.check)

    def follow(self, number: int, stored: LoadedTensors) -> None:
        """Take the calibration states through a layer that is finished."""
        with self.model.layer(number, stored) as layer:
            attend(self.model, layer, self.states, self.states, self.context.check)
            self._finish(number, layer)

    def entry(self, step: LayerStep) -> Entry:
        """The journal's entry of a layer after its step, as far as it is known before its shard is on disk."""
        return {
            "layer": step.number,
            "shard": self.job.plan.shard_file(step.number),
            "source": step.source.digest(),
            "seconds": step.watch.seconds,
            "proof": step.proof,
            **self._solved,
        }

    def routed(self, data: CalibrationData, number: int) -> list[list[int]]:
        """Tokens routed to each expert of the layer that was solved last: a row per category, see `category_names`.

        A layer without experts has no rows.
        """
        if number in self.job.sizes.dense:
            return []
        names = category_names(data.samples)
        counts = torch.zeros(len(names), self.job.sizes["experts"], dtype=torch.int64)
        chosen = self.moe_inputs.chosen.flat.cpu().split(self.states.lengths)
        for sample, experts in zip(data.samples, chosen, strict=True):
            counts[names.index(sample.category)] += route_counts(experts.long(), counts.shape[1])
        rows: list[list[int]] = counts.tolist()
        return rows


def _audit_shard(job: Job, number: int, source: LoadedTensors, made: LoadedTensors, device: torch.device) -> LayerAudit:
    """Compare what is going to be in a layer's file with the source."""
    audit = written_from(job.plan.of_layer(number))
    bits = job.plan.schemes[number].bits
    audit_layer(number, job.facts, job.sizes, source, made, bits=bits, device=device, audit=audit)
    return audit
