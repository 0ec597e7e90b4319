"""Makes quantized layers: MoE inputs from calibration states, the solution, the packed tensors, and states after them.

Attention runs once, since quantizing changes nothing before the norm that the experts read. Statistics come from a
forced pass (every expert sees every token); the states that the next layer reads come from the router's own choice,
through the quantized experts, as they will be read from the finished file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from quantizers.architectures.attention import keys_and_values
from quantizers.calibration.samples import CalibrationData, category_names
from quantizers.checkpoint.loaded_tensors import LoadedTensors, tensors_in_memory
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import PinnedBuffers, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.model.activation_store import ActivationStore
from quantizers.model.kv_cache import Peaks, scales_of
from quantizers.model.layer_forward import attend, finish, observe, run_whole
from quantizers.model.layer_weights import ExpertWeights
from quantizers.model.moe_inputs import MoeInputStore, moe_input_store, route_counts
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.device_memory import Place
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.planning.job import Job
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve_layer
from quantizers.stitch.write.shard import LayerTensors, converted_tensors, layer_tensors
from quantizers.system.progress import doing
from quantizers.walk.context import Context
from quantizers.walk.walk import LayerStep

from .layer_entry import of_solution

NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Calibration:
    """The calibration samples on their way through the layers.

    Attributes:
        states: their hidden states, between two layers or two halves of one.
        moe_inputs: what the experts of the layer at hand are called with.
    """

    states: ActivationStore
    moe_inputs: MoeInputStore

    def remove(self) -> None:
        """Remove the files, if there are any."""
        self.states.remove()
        self.moe_inputs.remove()


@dataclass(frozen=True)
class Solved:
    """A layer that is solved and not yet packed.

    Attributes:
        experts: None in a layer without experts.
        made: tensors that were neither solved nor kept: converted linear modules, scales of an FP8 cache.
        kv_peaks: largest magnitudes of keys and of values, if the layer gets such scales.
    """

    experts: LayerResult | None
    made: Mapping[str, torch.Tensor]
    kv_peaks: Sequence[float] = ()

    @property
    def entry(self) -> dict[str, Any]:
        """Fields of the layer for the journal."""
        return of_solution(self.experts) | ({"kv_peaks": list(self.kv_peaks)} if self.kv_peaks else {})


class Quantizer:
    """The maker of quantized layers: a run has one, and so have several draws of calibration sets.

    Args:
        model: the source.
    """

    def __init__(self, job: Job, model: StreamedModel, context: Context) -> None:
        self.job = job
        self.model = model
        self.context = context
        self._buffers = PinnedBuffers(model.device)  # a process has two shards on their way at most

    def solve_from_stored(self, step: LayerStep, calibration: Calibration) -> Solved:
        """Solve the layer behind the output's attention, converted if the plan says so; see `solve`.

        The module is made of the layer's stored tensors; that of the source is not needed.
        """
        plan, number = self.job.plan, step.number
        linears = converted_tensors(plan, number, step.on_device, self.model.device)
        others = {
            action.source: step.on_device.tensor(action.source)
            for action in plan.of_layer(number)
            if action.kind != "convert" and (action.kind != "drop" or action.expert is not None)
        }
        stored = tensors_in_memory(step.on_device, others | linears, step.on_device.folder)
        with self.model.layer(number, stored, experts=False) as layer:
            return self.solve(step, layer, calibration, stored, linears)

    def solve(
        self,
        step: LayerStep,
        layer: DecoderLayer,
        calibration: Calibration,
        stored: LoadedTensors,
        linears: Mapping[str, torch.Tensor] = NOTHING,
    ) -> Solved:
        """Take the calibration states through attention, and solve the experts from what they are called with.

        Args:
            layer: without its experts' weights.
            calibration: its states enter the layer; afterwards they are the residual stream.
            stored: the layer's tensors on the device, with its experts as in the source.
            linears: those among them that were converted.
        """
        job = self.job
        model = self.model
        context = self.context
        number = step.number
        doing("attention")
        settings = job.plan.settings(number)
        library, states = settings.engine == "llmcompressor", calibration.states
        entering = [states[i].clone() for i in range(len(states))] if library else []
        largest = self._observe(layer, calibration)
        made, peaks = dict(linears), list[float]()
        if largest is not None:
            made |= dict(zip(job.plan.kv_scales(number), scales_of(largest).split(1), strict=True))
            peaks = largest.tolist()
        if number in job.facts.dense:
            return Solved(None, made, peaks)
        step.watch.lap("observe")
        weights = ExpertWeights(stored, job.facts, number, model.device, model.dtype)
        norm = job.facts.norm if job.plan.folds else None
        with model.layer(number, stored) if library else contextlib.nullcontext(layer) as module:
            result = solve_layer(
                model,
                module,
                stored.tensor(job.facts.layer(number, norm.tensor)) if norm else None,
                calibration.moe_inputs,
                settings,
                weights=weights.batch,
                residents=context.placement.residents,
                entering=entering,
                check=context.check,
                dist=context.dist,
            )
        weights.require_finite()
        step.watch.lap("solve")
        return Solved(result, made, peaks)

    def _observe(self, layer: DecoderLayer, calibration: Calibration) -> torch.Tensor | None:
        """Take the states through the layer's first half, and capture what its experts are called with.

        Returns:
            The largest magnitudes of keys and of values (2,), if the layer gets scales for an FP8 cache.
        """
        model, states = self.model, calibration.states
        check = self.context.check
        peaks = Peaks()
        cached = bool(self.job.plan.kv_scales(layer.number))
        with keys_and_values(layer.module, peaks.see) if cached else contextlib.nullcontext():
            if layer.number not in self.job.facts.dense:
                observe(model, layer, states, calibration.moe_inputs, check)
            elif layer.halves or not cached:
                attend(model, layer, states, states, check)
            else:
                run_whole(model, layer, states, check)
        return peaks.of_all(self.context.dist, model.device) if cached else None

    def pack(self, step: LayerStep, solved: Solved, *, written: bool = False) -> LayerTensors:
        """All tensors of the layer's shard; `written`: this process writes it, and needs them on the host."""
        doing("packing")
        return layer_tensors(
            self.job.plan,
            step.number,
            step.source,
            solved.experts,
            made=solved.made,
            near=step.on_device,
            buffers=self._buffers,
            written=written,
        )

    def shard(self, number: int) -> str:
        """The file of a layer's shard, within the work folder."""
        return f"output/{self.job.plan.shard_file(number)}"

    def as_stored(self, step: LayerStep, tensors: LayerTensors) -> LoadedTensors:
        """A packed layer's tensors on the device, as a reader of its shard finds them."""
        return tensors_in_memory(step.source, tensors.device, self.context.work / self.shard(step.number))

    def propagate(self, layer: DecoderLayer, states: ActivationStore) -> None:
        """Take calibration states through the second half of a quantized layer."""
        doing("calibration pass")
        finish(self.model, layer, states, f"layer {layer.number}", self.context.check)

    def routed_tokens(self, calibration: Calibration, data: CalibrationData, number: int) -> list[list[int]]:
        """Tokens routed to each expert of the layer that was solved last: a row per category, see `category_names`.

        A layer without experts has no rows.
        """
        facts = self.job.facts
        if number in facts.dense:
            return []
        names = category_names(data.samples)
        counts = torch.zeros(len(names), facts.num_experts, dtype=torch.int64)
        chosen = calibration.moe_inputs.chosen.flat.cpu().split(calibration.states.lengths)
        for sample, experts in zip(data.samples, chosen, strict=True):
            counts[names.index(sample.category)] += route_counts(experts.long(), counts.shape[1])
        rows: list[list[int]] = counts.tolist()
        return rows

    def calibration(self, lengths: Sequence[int]) -> Calibration:
        """New stores for calibration sequences of these lengths, which each process has its part of."""
        placement = self.context.placement
        states = self._rows(
            lengths, placement.states, "states", self.model.row_width, self.model.dtype, dist=self.context.dist
        )
        return Calibration(states, self.moe_inputs(lengths))

    def moe_inputs(self, lengths: Sequence[int]) -> MoeInputStore:
        """A new store for what the experts of a layer are called with."""
        new = partial(self._rows, lengths, self.context.placement.inputs)
        return moe_input_store(new, self.job.facts, self.model.dtype)

    def _rows(
        self,
        lengths: Sequence[int],
        place: Place,
        name: str,
        width: int,
        dtype: torch.dtype,
        *,
        dist: ProcessGroup = SINGLE_PROCESS,
    ) -> ActivationStore:
        """A new store of rows (Σ T_i, width) for sequences of T_i tokens, in a file of this name or elsewhere."""
        context, device = self.context, self.model.device
        rank = "" if context.dist.is_main else f"-{context.dist.rank}"
        path = context.work / f"{name}{rank}.bin" if place == "files" else None
        on, chunk = device if place == "device" else None, tokens_per_chunk(is_accelerator(device))
        store = ActivationStore(path, lengths, width, dtype, on, dist=dist, chunk=chunk)
        if place == "memory":
            pin(store.flat, device)
        return store
