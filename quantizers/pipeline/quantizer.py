"""The quantizer of a run: makes, from each of the source's layers, the quantized one, and writes its shard.

Calibration states go through the layers beside the held-out texts. Where a layer's first half ends, they are what the
layer is solved from: attention runs once, since quantizing changes nothing before the norm that the experts read.
Statistics come from a forced pass (every expert sees every token); the states that the next layer reads come from
the router's own choice, through the quantized experts, as they will be read from the finished file.

These states are not written to disk durably: a run that resumes computes them again from the calibration set and the
finished shards, with about a twentieth of the operations that quantizing took. They are kept in memory where they fit,
else in files that are overwritten in place.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from quantizers.calibration.samples import CalibrationData, category_names
from quantizers.checkpoint.loaded_tensors import LoadedTensors, tensors_in_memory
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import PinnedBuffers, pin
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.layers.context import Context
from quantizers.layers.step import LayerStep
from quantizers.layers.writer import ShardWriter
from quantizers.model.activation_store import ActivationStore
from quantizers.model.activation_stream import ActivationStream, embed
from quantizers.model.layer_forward import attend, finish, observe
from quantizers.model.layer_weights import ExpertWeights
from quantizers.model.moe_inputs import moe_input_store, route_counts
from quantizers.model.streamed_model import DecoderLayer, StreamedModel
from quantizers.planning.device_memory import Place
from quantizers.planning.expert_batches import tokens_per_chunk
from quantizers.planning.job import Job
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve_layer
from quantizers.system.progress import doing
from stitch.audit.layer import LayerAudit, audit_layer, written_from
from stitch.write.digests import ShardDigest
from stitch.write.shard import kept_hashes, layer_tensors, write_shard

Written = tuple[ShardDigest, LayerAudit]


class Quantizer:
    """Makes and writes a layer at each step: a candidate of `eval.fidelity.comparison`.

    Args:
        job: what to do, and with which settings.
        model: its structure, and the tensors outside the layers.
        stream: its held-out states.
        context: where the work is done.
        lengths: calibration tokens of each sequence.
        writer: writes and audits shards in the background.

    Attributes:
        states: the calibration states between the layers.
        moe_inputs: what the experts of the last layer were called with.
    """

    def __init__(
        self,
        job: Job,
        model: StreamedModel,
        stream: ActivationStream,
        context: Context,
        lengths: Sequence[int],
        *,
        writer: ShardWriter[ShardDigest, LayerAudit],
    ) -> None:
        self.job, self.model, self.stream, self.context, self.writer = job, model, stream, context, writer
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

        self.states = rows(context.states, "states", model.row_width, model.dtype, context.dist)
        self.moe_inputs = moe_input_store(partial(rows, context.inputs), job.sizes, model.dtype)
        self._packed = PinnedBuffers(model.device)  # a process has two shards on their way at most
        self._made: LoadedTensors | None = None
        self._solved: dict[str, Any] = {}

    def embed(self, tokens: Sequence[torch.Tensor] | None) -> None:
        """Fill the states that enter layer 0 from token ids (T,) int64, which rank 0 alone gives."""
        lengths = self.states.partition.lengths
        together = torch.cat(list(tokens)) if tokens else torch.empty(sum(lengths), dtype=torch.int64)
        self.context.dist.broadcast(together)
        embed(self.model, torch.split(together, lengths), self.states)

    def prepare(self, step: LayerStep, layer: DecoderLayer) -> None:
        """Observe and solve the layer, and begin to write it. A layer without experts is only written."""
        job, model, context, number = self.job, self.model, self.context, step.number
        doing("attention")
        if number in job.sizes.dense:
            attend(model, layer, self.states, self.states, context.check)
            self._begin_writing(step, None)
            return
        settings = job.plan.settings(number)
        library = settings.engine == "llmcompressor"
        entering = [self.states[i].clone() for i in range(len(self.states))] if library else []
        observe(model, layer, self.states, self.moe_inputs, context.check)
        step.watch.lap("observe")
        weights = ExpertWeights(step.on_device, job.facts, job.sizes, number, model.device, model.dtype)
        norm = job.facts.norm if job.plan.folds else None
        with model.layer(number, step.on_device) if library else contextlib.nullcontext(layer) as whole:
            solved = solve_layer(
                model,
                whole,
                step.on_device.tensor(job.facts.layer(number, norm.tensor)) if norm else None,
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
        self._begin_writing(step, solved)

    def _begin_writing(self, step: LayerStep, solved: LayerResult | None) -> None:
        """Pack a layer, and let its shard be audited and written if it is this process's turn.

        Args:
            solved: None for a layer without experts.
        """
        job, number, source, writes = self.job, step.number, step.source, self.writer.has_turn(step.number)
        path = self.context.work / "output" / job.plan.shard_file(number)
        doing("packing")
        tensors = layer_tensors(
            job.plan, number, source, solved, near=step.on_device, buffers=self._packed, written=writes
        )
        self._made = made = tensors_in_memory(source, tensors.device, path)
        self._solved = _for_the_journal(solved)
        if writes:
            host = tensors.host
            if self.writer.pending:  # the source's memory gets other bytes before the shard is on disk
                host = {name: tensor.clone() if source.holds(tensor) else tensor for name, tensor in host.items()}
            self.writer.begin(
                number,
                partial(audit_shard, job, number, step.on_device, made, self.context.device),
                partial(write_shard, host, path, kept_hashes(job.plan, number, source), job.plan.unread(number)),
            )
        else:
            self.writer.skip(number)
        step.watch.lap("pack")

    @contextlib.contextmanager
    def layer(self, step: LayerStep) -> Iterator[DecoderLayer]:
        """The quantized layer, read from the tensors that are being written; calibration passes through it first."""
        assert self._made is not None
        with self.model.layer(step.number, self._made) as layer:
            self._made = None
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

    def entry(self, step: LayerStep) -> dict[str, Any]:
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

        Args:
            number: of the layer; one without experts has no rows.
        """
        if number in self.job.sizes.dense:
            return []
        names = category_names(data.samples)
        counts = torch.zeros(len(names), self.job.sizes["experts"], dtype=torch.int64)
        chosen = self.moe_inputs.chosen.flat.cpu()
        for i, sample in enumerate(data.samples):
            in_sample = chosen[self.moe_inputs.sequence(i)].long()
            counts[names.index(sample.category)] += route_counts(in_sample, counts.shape[1])
        rows: list[list[int]] = counts.tolist()
        return rows

    def remove(self) -> None:
        """Remove the files of the states, if there are any."""
        self.states.remove()
        self.moe_inputs.remove()


def audit_shard(job: Job, number: int, source: LoadedTensors, made: LoadedTensors, device: torch.device) -> LayerAudit:
    """Compare what is going to be in a layer's file with the source."""
    audit = written_from(job.plan.of_layer(number))
    audit_layer(number, job.facts, job.sizes, source, made, device=device, audit=audit)
    return audit


def of_shard(written: Written) -> dict[str, Any]:
    """What the journal's entry says of a layer's shard once that is on disk."""
    digest, audit = written
    return {"digest": digest, "audit": audit.as_dict(), "closeness": _closeness(audit.by_expert)}


def _for_the_journal(solved: LayerResult | None) -> dict[str, Any]:
    if solved is None:
        return {"error": {}, "fallbacks": [], "leaning": None}
    return {
        # JSON has no infinity. An infinite error means that an expert's weights or inputs overflow.
        "error": {key: value if math.isfinite(value) else None for key, value in solved.error.items()},
        "fallbacks": _by_expert(solved.fallbacks),
        "leaning": solved.under_routed,
    }


def _closeness(errors: Sequence[float | None]) -> dict[str, float] | None:
    """How far the experts' matrices are from the source's, for the report: the median, the worst, and whose it is."""
    known = {expert: error for expert, error in enumerate(errors) if error is not None}
    if not known:
        return None
    worst = max(known, key=lambda expert: known[expert])
    return {"median": statistics.median(known.values()), "worst": known[worst], "worst_expert": worst}


def _by_expert(lines: Sequence[str]) -> list[str]:
    """Sort lines by expert number, so that the report does not depend on how many experts were solved at a time."""
    numbers = {line: re.match(r"expert (\d+)", line) for line in lines}
    return sorted(lines, key=lambda line: int(match[1]) if (match := numbers[line]) else -1)
