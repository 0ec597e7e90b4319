"""Quantization of a run's layers in order, `quantize_from`, and of a single layer, `quantize_layer`.

Calibration states go through the layers beside the held-out texts. A layer is done once its shard and the held-out
states after it are on disk: then its journal entry is written, and only after that are the states before it removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.loaded_tensors import LoadedTensors
from quantizers.eval.fidelity.comparison import compare
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.variants import Variants
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.output import journal
from quantizers.planning.job import Job
from quantizers.recipe.schema import Stop
from quantizers.stitch.audit.layer import LayerAudit, audit_layer, written_from
from quantizers.stitch.write.shard import LayerTensors, kept_hashes, write_shard
from quantizers.system.progress import doing, forecast, peak_memory, progress
from quantizers.walk.context import Context
from quantizers.walk.walk import LayerStep, all_tensors, walk

from .layer_entry import LayerEntry, QuantizedLayer, Written, layer_note, refuse_layer
from .observer import Observation
from .quantizer import Calibration, Quantizer
from .shard_writer import ShardWriter


@dataclass(frozen=True)
class Run:
    """State that a run's process carries from layer to layer.

    Attributes:
        texts: the held-out texts; `source`, `output`, `variants`: their states in the source, in the output, and in
            other computations of both. Without texts nothing is compared.
        observation: the calibration samples in the source, see observer.py; None without an observer.
        data: the calibration samples, in rank 0 alone, which keeps the journal.
    """

    quantizer: Quantizer
    calibration: Calibration
    texts: Sequence[Text]
    source: ActivationStream
    output: ActivationStream
    variants: Variants
    writer: ShardWriter
    observation: Observation | None
    data: CalibrationData | None

    @property
    def job(self) -> Job:
        """The job, with a source whose files lie on the disk."""
        return self.quantizer.job

    @property
    def context(self) -> Context:
        """Its work folder, device and processes."""
        return self.quantizer.context

    @property
    def model(self) -> StreamedModel:
        """The source."""
        return self.quantizer.model

    @property
    def streams(self) -> list[ActivationStream]:
        """All streams of the held-out texts."""
        return [self.source, self.output, *self.variants.streams]


def quantize_from(run: Run, done: int, entries: list[LayerEntry], stop: Stop | None) -> None:
    """Quantize the layers after the first `done`; rank 0 adds the journal entry of each one that is done to `entries`.

    Raises:
        Stopped: a layer's figures are beyond `stop`.
    """
    job = run.job
    context = run.context
    dist = context.dist
    layers = job.facts.num_layers
    finished = [*journal.passthrough_shards(context.work), *(entry.file for entry in entries)]
    context.upload(*finished)  # unless an earlier call did
    say_forecast = forecast(layers)
    begun: dict[int, QuantizedLayer] = {}  # in rank 0, layers whose shards are not on disk yet
    tensors, early = all_tensors(job, job.opened, done), context.placement.prefetch
    shown = progress("quantizing", layers, done, "layer", trusted=1, kept=True, silent=not dist.is_main)

    def finish_layers(shards: Mapping[int, Written]) -> None:
        """Journal layers whose shards are on disk: from then on they are done."""
        for number, written in shards.items():
            if dist.is_main:
                entry = begun.pop(number).entry(written, peak_memory(context.device))
                for stream in run.streams:
                    stream.on_disk(number + 1)  # from there a run resumes once the layer is journaled
                entry.write(context.work)
                entries.append(entry)
            for stream in run.streams:
                stream.forget(number)
            if dist.is_main:
                show(layer_note(entry))
                say_forecast(entry.layer, sum(entry.seconds.values()), bool(entry.routed))
                context.upload(entry.file)
                refuse_layer(entry, stop)

    with shown as show, walk(job.opened, tensors, run.model, check=context.check, dist=dist, early=early) as steps:
        for step in steps:
            quantized = quantize_layer(run, step)
            if quantized is not None:
                begun[step.number] = quantized
            doing("audit")
            shards = run.writer.finished()
            step.watch.lap("write")
            finish_layers(shards)
        run.calibration.remove()
        if run.observation is not None:
            run.observation.end()
        finish_layers(run.writer.finished(pending=0))


def quantize_layer(run: Run, step: LayerStep, *, again: bool = False) -> QuantizedLayer | None:
    """Take one layer from the source's bytes to the states that enter the next one.

    Args:
        again: a damaged shard is made once more: the texts have been through this layer.

    Returns:
        What the journal gets of it once its shard is on disk; None in ranks except 0. While the shard is written, the
        next layer may be begun, see `ShardWriter`.
    """
    quantizer = run.quantizer
    calibration = run.calibration
    plan = run.job.plan
    number = step.number
    watch = step.watch
    texts = () if again else run.texts
    observation = None if again else run.observation

    # The source: held-out texts pass through it. Then its experts' weights are freed: solving needs their memory, and
    # dequantizes one batch of them at a time.
    with step.module(experts=bool(texts) or observation is not None) as layer:
        if observation is not None:
            observation.add_layer(layer)
        if texts:
            doing("held-out texts")
            run.source.advance(layer)
        step.release_experts(layer)
        if texts:
            watch.lap("reference")
        if plan.attention == "keep":
            solved = quantizer.solve(step, layer, calibration, step.on_device)
    # Experts read what attention gives them in the output: where that is converted, they are solved behind it, once the
    # source's module is freed.
    if plan.attention != "keep":
        solved = quantizer.solve_from_stored(step, calibration)

    # The shard: packed, and in the background audited against the source and written.
    tensors = quantizer.pack(step, solved, written=run.writer.has_turn(number))
    output = quantizer.as_stored(step, tensors)
    _write_in_background(run, step, tensors, output)
    source = step.source.digest() if run.data is not None else ""
    solution = solved.entry
    del solved, tensors  # the device's memory is now the forward pass's
    watch.lap("pack")

    # The quantized layer, from the tensors that are being written: calibration and texts pass through it.
    with run.model.layer(number, output) as layer:
        if not run.variants:
            del output
        watch.lap("materialise")
        quantizer.propagate(layer, calibration.states)
        watch.lap("propagate")
        if texts:
            doing("held-out texts")
            run.output.advance(layer)
            watch.lap("candidate")
    figures = None
    if texts:
        doing("comparing")
        routed = number not in run.job.facts.dense
        figures = compare(run.source, run.output, texts, routed=routed, dist=run.context.dist)
        watch.lap("compare")
        if run.variants:
            run.variants.advance(step, [step.on_device, output])
    if run.data is None:
        return None
    return QuantizedLayer(
        number,
        plan.shard_file(number),
        source,
        seconds=watch.seconds,
        proof=step.proof,
        solution=solution,
        routed=quantizer.routed_tokens(calibration, run.data, number),
        held_out=figures,
    )


def _write_in_background(run: Run, step: LayerStep, tensors: LayerTensors, output: LoadedTensors) -> None:
    """Let the layer's shard be audited and written, if it is this process's turn."""
    number = step.number
    writer = run.writer
    if not writer.has_turn(number):
        writer.skip(number)
        return
    plan = run.job.plan
    host = tensors.host
    if writer.pending:  # the source's memory gets other bytes before the shard is on disk
        host = {name: tensor.clone() if step.source.holds(tensor) else tensor for name, tensor in host.items()}
    path = run.context.work / run.quantizer.shard(number)
    kept = kept_hashes(plan, number, step.source)
    audit = partial(_audit, run.job, number, step.on_device, output, run.context.device)
    writer.begin(number, audit, partial(write_shard, host, path, kept, plan.unread(number)))


def _audit(job: Job, number: int, source: LoadedTensors, output: LoadedTensors, device: torch.device) -> LayerAudit:
    """Compare what is going to be in a layer's file with the source."""
    audit = written_from(job.plan.of_layer(number))
    bits = job.plan.schemes[number].bits
    audit_layer(number, job.facts, source, output, bits=bits, device=device, audit=audit)
    return audit
