"""One model quantized with several calibration sets side by side, in one pass over its source; nothing is written.

A lane is one draw of one set: its calibration states, and the states of the held-out texts in the output that the draw
gives. At each layer the lanes are worked on one after another, each as `quantize run` would, so only one of their
quantized layers exists at a time, and figures are a run's. The source's states of the held-out texts exist once.

States are in files, two for each lane. A layer is done once its entry is in the journal; then the states before it are
removed, and from there a call resumes:

    lanes.json          the settings that figures depend on
    layer-00003.json    a LaneLayer of each lane at layer 3
    states-*            the states that enter the next layer
    scores-*            what was scored of each text, by lane
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.loaded_tensors import load_tensors, outside_names
from quantizers.device.devices import forward_dtype, use_one_arena
from quantizers.distributed.process_group import ProcessGroup, rank_0_progress
from quantizers.eval.fidelity.comparison import by_text
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import Scores, score
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.output.journal import check_room
from quantizers.output.layer_files import LayerFiles
from quantizers.pipeline.options import Options
from quantizers.pipeline.placement import place_activations
from quantizers.pipeline.quantizer import Calibration, Quantizer
from quantizers.planning.device_memory import held_out_bytes
from quantizers.planning.job import Job
from quantizers.system.keys import Part, key, maybe
from quantizers.system.progress import doing, progress
from quantizers.walk.context import Context
from quantizers.walk.walk import LayerStep, all_tensors, walk

SCORED_TOGETHER = 4  # lanes whose logits are in memory together


@dataclass(frozen=True)
class LaneFigures:
    """Measurements of one lane.

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


class LaneLayer(Part):
    """A layer of one lane, as the journal has it: `comparison.OfText` of each text, in the order of the texts."""

    same: list[float] = key("By text")
    difference: list[float] = key("By text")
    size: list[float] = key("By text")
    routed: list[list[int]] | None = maybe("Calibration tokens routed to each expert; absent if it is not quantized")


@dataclass(frozen=True)
class Lane:
    """One draw of a calibration set, and the model that is quantized with it.

    Attributes:
        calibration: the samples' states. output: those of the held-out texts in the output.
    """

    data: CalibrationData
    calibration: ActivationStream
    output: ActivationStream

    @property
    def streams(self) -> list[ActivationStream]:
        """Both streams."""
        return [self.calibration, self.output]


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
    work = context.work
    dist = context.dist
    layers = job.facts.num_layers
    use_one_arena()
    outside = load_tensors(job.opened, outside_names(job.opened, job.facts))
    model = StreamedModel(outside, job.facts, context.device, forward_dtype(context.device))
    quantizer = Quantizer(job, model, context)
    new = partial(ActivationStream, model=model, folder=work, durable=True, check=check, dist=dist)
    lengths = [len(text.tokens) for text in texts]
    source = new(job.opened.name, number=0, lengths=lengths)
    lanes = [
        Lane(
            data,
            new(data.name, number=2 * n + 2, lengths=[len(sample.tokens) for sample in data.samples]),
            new(f"{data.name}'s output", number=2 * n + 1, lengths=lengths),
        )
        for n, data in enumerate(draws)
    ]
    journal = LayerFiles(work)
    entries: list[list[LaneLayer]] = []
    if dist.is_main:
        entries = [list(map(LaneLayer.model_validate, layer)) for layer in journal.read(layers)]
    done: int = dist.broadcast_object(len(entries))
    outputs = [lane.output for lane in lanes]
    for stream in (source, *outputs):
        stream.enter(done, [text.tokens for text in texts])
    if done < quantized:
        for lane in lanes:
            lane.calibration.enter(done, token_tensors(lane.data, job.facts.vocab_size))
    tensors, early = all_tensors(model, job.opened, done), context.placement.prefetch
    with (
        rank_0_progress("quantizing", layers, done, check, dist) as shown,
        walk(job.opened, tensors, model, check=check, dist=dist, early=early) as steps,
    ):
        for step in steps:
            unchanged = step.number >= quantized
            with step.module() as layer:
                doing("held-out texts")
                for stream in (source, *(outputs if unchanged else [])):
                    stream.advance(layer)
            by_lane = []
            for lane in lanes:
                routed = None if unchanged else _quantize(quantizer, step, lane)
                by_lane.append(_compared(source, lane.output, step.number, dist).changed(routed=routed))
            if dist.is_main:
                entries.append(by_lane)
                journal.write(step.number, [layer.as_dict() for layer in by_lane])
            for stream in (source, *(stream for lane in lanes for stream in lane.streams)):
                stream.forget(step.number)
            shown(f"layer {step.number}")
    return _scored(source, outputs, texts, context, dist.broadcast_object(entries))


def _quantize(quantizer: Quantizer, step: LayerStep, lane: Lane) -> list[list[int]]:
    """Quantize a layer with a lane's samples, and take these and the texts through it: `routed_tokens`."""
    lengths = [len(sample.tokens) for sample in lane.data.samples]
    calibration = Calibration(lane.calibration.begin(step.number), quantizer.moe_inputs(lengths))
    # Each lane solves behind a module of its own, after the source's: so one of these is in memory at a time.
    solved = quantizer.solve_from_stored(step, calibration)
    output = quantizer.as_stored(step, quantizer.pack(step, solved))
    step.watch.lap("pack")
    del solved
    with quantizer.model.layer(step.number, output) as layer:
        del output
        step.watch.lap("materialise")
        quantizer.propagate(layer, calibration.states)
        step.watch.lap("propagate")
        lane.calibration.keep(step.number + 1)
        routed = quantizer.routed_tokens(calibration, lane.data, step.number)
        calibration.moe_inputs.remove()
        del calibration
        doing("held-out texts")
        lane.output.advance(layer)
    return routed


def _compared(source: ActivationStream, output: ActivationStream, number: int, dist: ProcessGroup) -> LaneLayer:
    """Compare each text's states after a layer, in the order of the texts."""
    texts = by_text(source, output, routed=number not in source.model.facts.dense, dist=dist)
    ordered = [texts[i] for i in sorted(texts)]
    return LaneLayer(
        same=[text.same for text in ordered],
        difference=[text.difference for text in ordered],
        size=[text.size for text in ordered],
    )


def _context(
    job: Job, draws: Sequence[CalibrationData], texts: Sequence[Text], options: Options, check: Callable[[], None]
) -> Context:
    """The context of all lanes; memory is budgeted for the one with the most tokens."""
    lengths = [[len(sample.tokens) for sample in data.samples] for data in draws]
    of_texts = [len(text.tokens) for text in texts]
    tokens, itemsize = [sum(of_draw) for of_draw in lengths], forward_dtype(options.device).itemsize
    longest = max(max(sizes) for sizes in (of_texts, *lengths))
    _, placed, in_files = place_activations(job, longest, max(tokens), 0, options)
    if options.dist.is_main:
        states = 2 * job.facts.row_bytes(itemsize) * sum(tokens)
        held_out = held_out_bytes(job.facts, sum(of_texts), itemsize) * (1 + len(draws)) // 2
        check_room(options.output, in_files + states + held_out, elsewhere="give --work on another disk")
    return Context(options.output, options.device, replace(placed, states="files"), check, options.dist)


def _scored(
    source: ActivationStream,
    outputs: Sequence[ActivationStream],
    texts: Sequence[Text],
    context: Context,
    entries: Sequence[Sequence[LaneLayer]],
) -> tuple[np.ndarray, list[LaneFigures]]:
    """The results of `measure_lanes`, from states that have left the last layer and the journal's entries by layer."""
    groups = range(0, len(outputs), SCORED_TOGETHER)
    starts = np.cumsum([0, *(len(text.tokens) - 1 for text in texts)])[:-1]
    of_source = np.zeros(len(texts))
    scores: list[Scores] = []
    measured: list[LaneFigures] = []
    with rank_0_progress("scoring", len(groups), 0, context.check, context.dist) as shown:
        silent = partial(progress, check=context.check, silent=True)
        for first in groups:
            group = outputs[first : first + SCORED_TOGETHER]
            kept = context.work / f"scores-{first}" if context.dist.node == 0 else None
            if kept:
                kept.mkdir(exist_ok=True)
            pairs = [(source, stream) for stream in (source, *group)]
            scored = score(pairs, texts, silent, kept, dist=context.dist)
            of_source = np.add.reduceat(scored[source, source][0], starts)
            scores += [scored[source, stream] for stream in group]
            shown(f"{len(scores)} of {len(outputs)} draws")
    for number, (nll, kl, _, top1) in enumerate(scores):
        sums = {
            name: np.add.reduceat(column.astype(float), starts)
            for name, column in (("nll", nll), ("kl", kl), ("top1", top1))
        }
        of_lane = [entry[number] for entry in entries]
        errors = [float(np.sqrt(np.sum(layer.difference) / np.sum(layer.size))) for layer in of_lane]
        routed = [np.array(layer.routed, dtype=np.int64) for layer in of_lane if layer.routed]
        same = np.sum([layer.same for layer in of_lane], axis=0)
        measured.append(LaneFigures(**sums, same=same, hidden_error=errors, routed=routed))
    return of_source, measured
