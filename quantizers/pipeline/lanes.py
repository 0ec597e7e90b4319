"""One model quantized with several calibration sets side by side, in one pass over its source; nothing is written.

A lane is one draw of one set: its calibration states, and the states of the held-out texts in the output that the draw
gives. At each layer the lanes are worked on one after another, each as `quantize run` would, so only one of their
quantized layers exists at a time, and figures are a run's. The source's states of the held-out texts exist once.

States are in files, two for each lane. A layer is done once its entry is in the journal; then the states before it are
removed, and from there a call resumes:

    lanes.json          the settings that figures depend on
    layer-00003.json    what was found of each lane at layer 3
    states-*            the states that enter the next layer
    scores-*            what was scored of each text, by lane
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.loaded_tensors import load_tensors, outside_names
from quantizers.device.devices import forward_dtype, use_one_arena
from quantizers.distributed.process_group import ProcessGroup, rank_0_progress
from quantizers.eval.fidelity.comparison import by_text
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import Scores, score
from quantizers.layers.context import Context
from quantizers.layers.loop import Consumer, LayerStep, Need, all_tensors, layer_steps
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.output.journal import check_room
from quantizers.planning.device_memory import held_out_bytes
from quantizers.planning.job import Job
from quantizers.system.files import write_json
from quantizers.system.progress import doing, progress

from .pipeline import Options, kept_in_memory
from .quantize import Quantizer

SCORED_TOGETHER = 4  # lanes whose logits are in memory together


@dataclass(frozen=True)
class LaneFigures:
    """What was measured of one lane.

    Attributes:
        nll, kl, top1: (n,) float64, sums over each text's scored tokens, see `eval.fidelity.metrics.Measured`.
        same: (n,) float64, choices of the source's routers that the output's make too, in all layers.
        hidden_error: by layer, ‖h_output − h_source‖ / ‖h_source‖ of the states that leave it.
        routed: by layer with experts that was quantized, the calibration tokens routed to each, (C, E) int64, a row for
            each category, see `category_names`.
    """

    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray
    same: np.ndarray
    hidden_error: list[float]
    routed: list[np.ndarray]


class Lane(Quantizer):
    """One draw of a calibration set, and the model that is quantized with it.

    Attributes:
        found: what the journal keeps of the layer that ran last.
    """

    def __init__(
        self,
        job: Job,
        model: StreamedModel,
        number: int,
        data: CalibrationData,
        texts: Sequence[Text],
        context: Context,
    ) -> None:
        self.data, self.found = data, dict[str, Any]()
        new = partial(ActivationStream, durable=True, check=context.check, dist=context.dist)
        lengths = [len(sample.tokens) for sample in data.samples]
        self.calibration = new(data.name, model, 2 * number + 2, lengths, context.work)
        stream = new(f"{data.name}'s output", model, 2 * number + 1, [len(text.tokens) for text in texts], context.work)
        super().__init__(job, model, stream, context, lengths)

    @contextlib.contextmanager
    def layer(self, step: LayerStep) -> Iterator[DecoderLayer]:
        """The quantized layer, once the calibration samples have passed through it."""
        self.moe_inputs, self.states = self.new_inputs(), self.calibration.begin(step.number)
        with super().layer(step) as layer:
            self.calibration.keep(step.number + 1)
            self.found = {"routed": self.routed(self.data, step.number)}
            self.moe_inputs.remove()
            del self.moe_inputs
            yield layer


class _Lanes(Consumer):
    """The source and all lanes.

    Args:
        quantized: layers before this one are quantized; in those from there on lanes have the source's.
    """

    needs: Need = "experts"

    def __init__(self, reference: ActivationStream, lanes: Sequence[Lane], quantized: int, dist: ProcessGroup) -> None:
        self.reference, self.lanes, self.quantized, self.dist = reference, lanes, quantized, dist

    def source_layer(self, step: LayerStep, layer: DecoderLayer) -> None:
        """The source's texts go through its layer, and those of the lanes where it is theirs."""
        streams = [self.reference]
        if step.number >= self.quantized:
            streams += [lane.stream for lane in self.lanes]
        doing("held-out texts")
        for stream in streams:
            stream.attend(step.number, layer)
            stream.finish(step.number, layer)

    def after_source(self, step: LayerStep) -> None:
        """Each lane's layer is made, its texts go through it, and are compared."""
        routed = step.number not in self.reference.model.facts.dense
        for lane in self.lanes:
            lane.found = {}
            if step.number < self.quantized:
                with lane.layer(step) as layer:
                    doing("held-out texts")
                    lane.stream.attend(step.number, layer)
                    lane.stream.finish(step.number, layer)
            found = by_text(self.reference, lane.stream, routed=routed, dist=self.dist)
            ordered = [found[i] for i in sorted(found)]
            lane.found |= {key: [getattr(one, key) for one in ordered] for key in ("same", "difference", "size")}


def measure_lanes(
    job: Job,
    draws: Sequence[CalibrationData],
    texts: Sequence[Text],
    quantized: int,
    options: Options,
    check: Callable[[], None],
) -> tuple[np.ndarray, list[LaneFigures]]:
    """Quantize the source with each draw, and measure all outputs on the same texts; all processes call this.

    Args:
        texts: each has two tokens or more.
        quantized: how many layers are quantized, from the first on.
        options: device, its memory, processes; and as `output` an existing folder for states and the journal, from
            which a call resumes.

    Returns:
        The source's −log p (n,) of each text, summed over its tokens; and what was measured of each draw.

    Raises:
        InputError: the device has too little memory for a layer.
        QuantizeError: a model's hidden states are not finite, or the disk has too little room for them.
    """
    context = _context(job, draws, texts, options, check)
    work, dist, layers = context.work, context.dist, job.facts.num_layers
    use_one_arena()
    outside = load_tensors(job.opened, outside_names(job.opened, job.facts))
    model = StreamedModel(outside, job.facts, context.device, forward_dtype(context.device))
    lengths = [len(text.tokens) for text in texts]
    reference = ActivationStream(job.opened.name, model, 0, lengths, work, durable=True, check=check, dist=dist)
    lanes = [Lane(job, model, number, data, texts, context) for number, data in enumerate(draws)]

    def journal(number: int) -> Path:
        return work / f"layer-{number:05d}.json"

    done: int = dist.broadcast_object(next((n for n in range(layers) if not journal(n).exists()), layers))
    streams = [reference, *(lane.stream for lane in lanes)]
    for stream in streams:
        if done:
            stream.resume(done)
        else:
            stream.embed([text.tokens for text in texts])
    if done < quantized:
        for lane in lanes:
            if done:
                lane.calibration.resume(done)
            else:
                lane.calibration.embed(token_tensors(lane.data, job.facts.vocab_size))
    entries = [json.loads(journal(number).read_text()) for number in range(done)] if dist.is_main else []
    tensors, early = all_tensors(model, job.opened, done), context.prefetch_to_device
    consumer = _Lanes(reference, lanes, quantized, dist)
    steps = layer_steps(job.opened, tensors, [consumer], model, check=check, dist=dist, early=early)
    with rank_0_progress("quantizing", layers, done, check, dist) as shown, contextlib.closing(steps):
        for step in steps:
            if dist.is_main:
                entries.append([lane.found for lane in lanes])
                write_json(journal(step.number), entries[-1])
            for stream in (*streams, *(lane.calibration for lane in lanes)):
                stream.forget(step.number)
            shown(f"layer {step.number}")
    return _scored(reference, lanes, texts, context, dist.broadcast_object(entries))


def _context(
    job: Job, draws: Sequence[CalibrationData], texts: Sequence[Text], options: Options, check: Callable[[], None]
) -> Context:
    """What fits in memory, of the lane with the most tokens, is kept there."""
    lengths, of_texts = (
        [[len(one.tokens) for one in data.samples] for data in draws],
        [len(one.tokens) for one in texts],
    )
    tokens, itemsize = [sum(one) for one in lengths], forward_dtype(options.device).itemsize
    longest = max(max(one) for one in (of_texts, *lengths))
    _, kept, in_files = kept_in_memory(job, longest, max(tokens), 0, options)
    if options.dist.is_main:
        states = 2 * job.facts.row_bytes(itemsize) * sum(tokens)
        held_out = held_out_bytes(job.facts, sum(of_texts), itemsize) * (1 + len(draws)) // 2
        check_room(options.output, in_files + states + held_out)
    kept["states"] = "files"
    return Context(options.output, options.device, check=check, dist=options.dist, **kept)


def _scored(
    reference: ActivationStream,
    lanes: Sequence[Lane],
    texts: Sequence[Text],
    context: Context,
    entries: Sequence[Sequence[dict[str, Any]]],
) -> tuple[np.ndarray, list[LaneFigures]]:
    """The results of `measure_lanes`, from states that have left the last layer and the journal's entries by layer."""
    groups = range(0, len(lanes), SCORED_TOGETHER)
    starts = np.cumsum([0, *(len(text.tokens) - 1 for text in texts)])[:-1]
    of_source, scores, measured = np.zeros(len(texts)), list[Scores](), list[LaneFigures]()
    with rank_0_progress("scoring", len(groups), 0, context.check, context.dist) as shown:
        silent = partial(progress, check=context.check, silent=True)
        for first in groups:
            group = lanes[first : first + SCORED_TOGETHER]
            kept = context.work / f"scores-{first}" if context.dist.node == 0 else None
            if kept:
                kept.mkdir(exist_ok=True)
            streams = [reference, *(lane.stream for lane in group)]
            source, *of_group = score(streams, texts, silent, kept, dist=context.dist)
            of_source = np.add.reduceat(source[0], starts)
            scores += of_group
            shown(f"{len(scores)} of {len(lanes)} draws")
    for number, (nll, kl, _, top1) in enumerate(scores):
        sums = {
            name: np.add.reduceat(column.astype(float), starts)
            for name, column in (("nll", nll), ("kl", kl), ("top1", top1))
        }
        found = [entry[number] for entry in entries]
        errors = [float(np.sqrt(np.sum(one["difference"]) / np.sum(one["size"]))) for one in found]
        routed = [np.array(one["routed"], dtype=np.int64) for one in found if one.get("routed")]
        same = np.sum([one["same"] for one in found], axis=0)
        measured.append(LaneFigures(**sums, same=same, hidden_error=errors, routed=routed))
    return of_source, measured
