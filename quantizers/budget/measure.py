"""Measurement, before a run with a budget, of what each candidate scheme would cost each layer.

Some of the calibration tokens, the *probe's*, go through the source's layers. At every layer with experts some of
these are rounded to nearest under each candidate, and the error of their outputs is measured, relative to the states
that leave the layer:

    error = Σ_e Σ_t r² ‖f̂_e(x_t) − f_e(x_t)‖² / Σ_t ‖y_t‖²        (r: routing weight, y: states leaving the layer)

Errors of different experts on one token are taken as independent. Instead of the run's scale search every column is
scaled by the root of its inputs' mean magnitude, the middle of AWQ's grid (Lin et al., arXiv 2306.00978, section 3.2),
and GPTQ is taken to make all candidates' errors smaller alike.

The weight of an error depends on the layers after it, which is measured once: the probe's tokens also pass through the
first layer with experts as the coarsest candidate would leave it, and then through all later layers unchanged. The rest
of this disturbance after each layer, and the KL at the end, give

    loss of a scheme in a layer  =  KL of the probe  *  error of the scheme / disturbance after the layer

in nats per token, where disturbance is ‖probe − source‖² / ‖source‖² of the states that leave the layer: an error is
taken to grow, or fade, on its way to the output as the probe's does from there on, and KL to grow with its square.
Only some experts are disturbed, so errors are enlarged to disturb as much as all would, and once more in bfloat16,
where the states' own rounding disturbs too.

    schemes/00003.json   the measurements of layer 3
    schemes/kl.json      the disturbance after each layer and the probe's KL; written last

Legend: E experts, H hidden, I expert width, T tokens.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import as_held, as_stacked, matrices_of, split_first
from quantizers.checkpoint.loaded_tensors import load_once, outside_names, with_tables
from quantizers.device.devices import forward_dtype, use_one_arena
from quantizers.distributed.process_group import rank_0_progress
from quantizers.eval.fidelity.comparison import by_text
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import score
from quantizers.formats.format import ExpertFormat
from quantizers.formats.packed_integers import dequantize
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.layer_forward import routes
from quantizers.model.moe_inputs import MoeInputs
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.job import Job
from quantizers.solve.rounding import minmax_scales, nearest
from quantizers.system.errors import QuantizeError
from quantizers.system.files import write_json
from quantizers.walk.context import Context
from quantizers.walk.walk import all_tensors, walk

FOLDER = "schemes"
PROBE_TOKENS, PROBE_LENGTH = 8192, 512  # tokens of the probe, and of one of its texts, at most
MEASURED_EXPERTS = 32  # of each layer, at most; their errors are scaled up to all
BFLOAT16_FACTOR = 2  # errors are enlarged by this in a probe that is computed in bfloat16
ALL = "all"


@dataclass(frozen=True)
class LayerErrors:
    """The errors of every candidate scheme in a layer with experts, by the schemes' names.

    All are squares, relative to the states that leave the layer.

    Attributes:
        experts: number of measured experts; `error` and `by_matrix` are scaled up to all experts of the layer.
        error: with all matrices of an expert rounded.
        by_matrix: with only one matrix rounded, by matrix.
        by_expert: each measured expert's part of `error`.
    """

    experts: int
    error: dict[str, float]
    by_matrix: dict[str, dict[str, float]]
    by_expert: dict[str, list[float]]


@dataclass(frozen=True)
class LayerMeasurement(LayerErrors):
    """Cost of each candidate scheme in a layer.

    Attributes:
        kl: of the probe, nats per token. disturbance: of the probe after this layer.
    """

    layer: int
    kl: float
    disturbance: float

    @property
    def loss(self) -> dict[str, float]:
        """KL that each scheme is predicted to cost, nats per token, by its name."""
        # A layer that rounding does not change, for example one of zeros, loses nothing under any scheme.
        return {
            scheme: self.kl * error / self.disturbance if self.disturbance else 0.0
            for scheme, error in self.error.items()
        }


def measure_schemes(job: Job, tokens: Sequence[torch.Tensor] | None, context: Context) -> list[LayerMeasurement] | None:
    """The measurements of all layers, made unless that has been done. All processes of a run call this.

    They share the probe's tokens. The calibration samples (T,) int64 and the result are None in all ranks except 0.

    Raises:
        QuantizeError: states or logits are not finite, or there is no room for them.
    """
    work = context.work
    dist = context.dist
    check = context.check
    finished = read_measurements(work, job.facts.moe_layers) if dist.is_main else None
    if dist.broadcast_object(finished is not None):
        return finished
    use_one_arena()
    files = work / FOLDER / "probe"
    if dist.local_rank == 0:
        shutil.rmtree(files, ignore_errors=True)  # of an interrupted measurement
    dist.in_turn(partial(files.mkdir, parents=True, exist_ok=True))
    probes = probes_of([len(sequence) for sequence in tokens or ()])
    texts = dist.broadcast_object(
        [Text(tokens[i][:length], "probe", 1) for i, length in probes.items()] if tokens else None
    )
    names, tensors = outside_names(job.opened, job.facts), all_tensors(job, job.opened)
    with context.streamed(job.opened, [names, *with_tables(job.opened, job.facts, tensors)]) as source:
        outside, dtype = load_once(source, names, dist), forward_dtype(context.device)
        model = StreamedModel(outside, job.facts, context.device, dtype)
        measurement, started = SchemeMeasurement(job, model, context, texts), time.monotonic()
        early = context.placement.prefetch
        with (
            rank_0_progress("measuring", len(tensors), 0, check, dist, unit="layer") as shown,
            walk(source, tensors, model, check=check, dist=dist, early=early) as steps,
        ):
            for step in steps:
                with step.module() as layer:
                    errors = measurement.measure(layer)
                seconds, started = time.monotonic() - started, time.monotonic()
                if dist.is_main:
                    entry = {"layer": step.number, **(asdict(errors) if errors else {}), "seconds": seconds}
                    write_json(_entry_file(work, step.number), entry)
                shown(f"{seconds:.1f} s")
        pair = measurement.source, measurement.probe
        _, kl, *_ = score([pair], texts, partial(rank_0_progress, check=check, dist=dist), dist=dist)[pair]
        if not math.isfinite(float(kl.mean())):
            raise QuantizeError(
                "", "the model's logits are not finite on the calibration texts", "nothing can be compared"
            )
    if dist.local_rank == 0:
        shutil.rmtree(files)
    if not dist.is_main:
        return None
    write_json(work / FOLDER / "kl.json", {"kl": float(kl.mean()), "disturbance": measurement.disturbance})
    return read_measurements(work, job.facts.moe_layers)


class SchemeMeasurement:
    """The probe's texts in two streams, as they are in the source and disturbed.

    Attributes:
        source, probe: the streams.
        disturbance: of the probe after each layer with experts so far.
    """

    def __init__(self, job: Job, model: StreamedModel, context: Context, texts: Sequence[Text]) -> None:
        self.job = job
        self.model = model
        self.context = context
        new = partial(ActivationStream, durable=False, check=context.check, dist=context.dist)
        folder, lengths = context.work / FOLDER / "probe", [len(text.tokens) for text in texts]
        self.source = new(job.opened.name, model, 0, lengths, folder)
        self.probe = new("the probe", model, 1, lengths, folder)
        for stream in (self.source, self.probe):
            stream.enter(0, [text.tokens for text in texts])
        self.disturbance: list[float] = []

    def measure(self, layer: DecoderLayer) -> LayerErrors | None:
        """Measure a layer, and take the texts through it; None without experts."""
        number = layer.number
        source = self.source
        probe = self.probe
        disturbed = any(self.disturbance)
        source.attend(layer)
        if disturbed:
            probe.attend(layer)
        else:  # so far it is the source
            probe.begin(number).flat.copy_(source.left.flat)
        errors = None
        if number in self.job.facts.dense:
            source.finish(layer)
            probe.finish(layer)
        else:
            errors = self._errors(layer, disturbed)
        for stream in (source, probe):
            stream.forget(number)
        return errors

    def _errors(self, layer: DecoderLayer, disturbed: bool) -> LayerErrors:
        """Measure a layer with experts, through which the texts then pass."""
        source = self.source
        probe = self.probe
        model = self.model
        dist = self.context.dist
        assert self.job.allocation is not None
        experts: Any = layer.module.get_submodule(self.job.facts.modules.experts)
        weights = as_stacked(experts, **self.job.facts.modules.layout)
        count = min(MEASURED_EXPERTS, len(weights[0]))
        moe_inputs = self._moe_inputs(layer)
        schemes, settings = self.job.allocation.candidates, self.job.recipe.experts
        kind = self.job.facts.of_layer(layer.number)
        gate, inner = gate_of(experts, kind.own_gate), bool(settings.awq) and kind.inner > 0
        outer = column_scale(moe_inputs.x) if settings.awq and self.job.plan.folds else None
        of_expert = partial(scheme_errors, gate=gate, outer=outer, inner=inner, signed=settings.signed)
        measured = []
        for expert in dist.partition(count):
            measured.append(of_expert(moe_inputs, weights, expert, schemes))
            self.context.check()
        gathered = dist.all_gather_object([losses for losses, _ in measured])
        lost = [losses for of_rank in gathered for losses in of_rank]  # by expert
        stored = {str(n): torch.stack([both[n] for _, both in measured]) for n in range(2)} if measured else {}
        coarsest = dist.all_gather(stored, model.device)
        source.finish(layer)
        if not disturbed:
            factor = math.sqrt(len(weights[0]) / count) * (BFLOAT16_FACTOR if model.dtype == torch.bfloat16 else 1)
            disturbed_weights = [w[:count].lerp(coarsest[str(n)].to(w.dtype), factor) for n, w in enumerate(weights)]
            held = as_held(*disturbed_weights, **self.job.facts.modules.layout)
            for name, weight in zip(self.job.facts.expert_parameters, held, strict=True):
                experts.get_parameter(name)[:count] = weight
        probe.finish(layer)
        compared = by_text(source, probe, routed=False, dist=dist)
        moved = math.fsum(text.difference for text in compared.values())
        size = math.fsum(text.size for text in compared.values())
        self.disturbance.append(moved / size)
        share = size * count / len(weights[0])
        matrices = self.job.facts.matrices
        errors = {
            str(s): {name: math.fsum(losses[s][name] for losses in lost) / share for name in (ALL, *matrices)}
            for s in schemes
        }
        return LayerErrors(
            experts=count,
            error={scheme: row[ALL] for scheme, row in errors.items()},
            by_matrix={scheme: {matrix: row[matrix] for matrix in matrices} for scheme, row in errors.items()},
            by_expert={str(s): [losses[s][ALL] / share for losses in lost] for s in schemes},
        )

    def _moe_inputs(self, layer: DecoderLayer) -> MoeInputs:
        """The inputs of the layer's experts, of all processes."""
        dist = self.context.dist
        blocks = [inputs for _, inputs in routes(self.model, layer, self.source.left)]
        names = MoeInputs._fields if blocks else ()
        inputs = {name: torch.cat([getattr(block, name) for block in blocks]) for name in names}
        return MoeInputs(**dist.all_gather(inputs, self.model.device))


def scheme_errors(
    moe_inputs: MoeInputs,
    weights: tuple[torch.Tensor, torch.Tensor],
    expert: int,
    schemes: Sequence[ExpertFormat],
    gate: Gate,
    *,
    outer: torch.Tensor | None,
    inner: bool,
    signed: bool = True,
) -> tuple[dict[ExpertFormat, dict[str, float]], tuple[torch.Tensor, torch.Tensor]]:
    """Error of one expert's outputs under each scheme.

    Args:
        weights: gate_up (E, 2I, H), or up (E, I, H) without a gate, and down (E, H, I), in the dtype of the forward
            pass.
        outer: the scale (H,) of the inputs of gate and up, see `column_scale`; None for none.
        inner: whether the inputs of down are scaled before rounding.
        signed: whether group scales may be negative.

    Returns:
        Σ r² ‖error‖² by scheme, and by which matrix alone was rounded (or all of them); and gate_up (2I, H) and down
        (H, I) as the first scheme leaves them.
    """
    matrices = matrices_of(*weights)
    first = split_first(weights[0][expert].float(), len(matrices))
    source = dict(zip(matrices, (*first, weights[1][expert].float()), strict=True))
    chosen = moe_inputs.chosen == expert
    rows = chosen.any(-1).nonzero()[:, 0]
    share = (moe_inputs.weight * chosen).sum(-1)[rows].double().square()
    x = moe_inputs.x[rows].float()
    h, wanted = _forward(x, source, gate)
    scales = dict.fromkeys(source, outer) | {"down": column_scale(h) if inner else None}
    lost = {}
    for scheme in schemes:
        stored = {matrix: _rounded(weight, scheme, scales[matrix], signed) for matrix, weight in source.items()}
        if scheme == schemes[0]:
            coarsest = torch.cat([stored[matrix] for matrix in matrices[:-1]]), stored["down"]
        variants = {ALL: stored} | {matrix: source | {matrix: stored[matrix]} for matrix in matrices}
        lost[scheme] = {
            name: float(((_forward(x, variant, gate)[1] - wanted).double().square().sum(-1) * share).nansum())
            for name, variant in variants.items()
        }
    return lost, coarsest


def column_scale(inputs: torch.Tensor) -> torch.Tensor:
    """The root of the inputs' mean magnitudes (C,), by which columns are multiplied before they are rounded."""
    return inputs.float().abs().mean(0).nan_to_num(1.0).clamp(min=1e-4).sqrt()


def _rounded(weight: torch.Tensor, scheme: ExpertFormat, smooth: torch.Tensor | None, signed: bool) -> torch.Tensor:
    """A matrix (R, C) scaled by (C,), rounded to nearest and scaled back."""
    smooth = torch.ones_like(weight[0]) if smooth is None else smooth
    scale = minmax_scales(weight * smooth, scheme.group_size, scheme.grid, signed=signed)
    return dequantize(nearest(weight * smooth, scale, scheme.grid), scale) / smooth


def _forward(x: torch.Tensor, weights: dict[str, torch.Tensor], gate: Gate) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of down (T, I), and the expert's output (T, H), from (T, H)."""
    products = torch.cat([x @ weight.T for matrix, weight in weights.items() if matrix != "down"], 1)
    h = gate(products.T).T
    return h, h @ weights["down"].T


def probes_of(lengths: Sequence[int], tokens: int | None = None, longest: int | None = None) -> dict[int, int]:
    """The sequences whose beginnings make up a probe, with the tokens of these: evenly spread over all sequences.

    Args:
        lengths: tokens of each sequence.
        tokens, longest: about how many in all, and of one beginning at most; those of a measurement by default.
    """
    tokens, longest = tokens or PROBE_TOKENS, longest or PROBE_LENGTH
    total = sum(min(length, longest) for length in lengths)
    chosen = range(0, len(lengths), max(1, round(total / tokens)))
    return {i: min(lengths[i], longest) for i in chosen if lengths[i] > 1}


def probe_bytes(facts: Architecture, lengths: Sequence[int], itemsize: int) -> int:
    """Bytes of the files of a measurement: both streams' states that enter and leave a layer, and their choices."""
    return 4 * sum(probes_of(lengths).values()) * (facts.row_bytes(itemsize) + facts.top_k * 4)


def read_measurements(work: Path, layers: Sequence[int]) -> list[LayerMeasurement] | None:
    """The finished measurements of the layers with experts; None while they are not complete."""
    try:
        probe = json.loads((work / FOLDER / "kl.json").read_text())
        kl = max(float(probe["kl"]), 0.0)
        measurements = []
        for number, disturbance in zip(layers, probe["disturbance"], strict=True):
            entry = json.loads(_entry_file(work, number).read_text())
            errors = {field.name: entry[field.name] for field in fields(LayerErrors)}
            measurements.append(LayerMeasurement(**errors, layer=number, kl=kl, disturbance=disturbance))
        return measurements
    except (OSError, ValueError, TypeError, KeyError):  # nothing there, or written by an older version
        return None


def measuring_seconds(work: Path, layers: int) -> float:
    """Seconds of the finished measurement, in all layers."""
    return float(sum(json.loads(_entry_file(work, number).read_text())["seconds"] for number in range(layers)))


def _entry_file(work: Path, layer: int) -> Path:
    return work / FOLDER / f"{layer:05d}.json"
