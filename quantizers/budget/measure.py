"""The pass before the run of a recipe with a budget: what each candidate scheme would cost each layer.

It walks through the layers once, on the source's own states. For every layer it measures the error of the experts'
output under each candidate (output_errors.py), and once what such an error does to the model: some tokens *branch
off*. They pass through this layer as the coarsest candidate would leave it, then through all later layers unchanged,
and at the end their KL is measured against the same tokens of the source. Both error and KL grow with the square of
a small disturbance, so

    loss of a scheme in a layer  =  KL of the layer's branch  *  error of the scheme / disturbance of the branch

in nats per token, where disturbance is ‖branch − source‖² / ‖source‖² of the states that leave the layer. This
accounts for the later layers, which the error alone cannot. Where only some experts are measured, their errors are
enlarged so that they disturb as much as all experts would. In bfloat16 branches also differ by the rounding of their
own states, so the source's tokens are run in the same shapes, and errors are enlarged once more.

Is the disturbance small enough for this? Every fourth sequence of a branch is run a second time, disturbed half as
much: a quarter of the disturbance should leave a quarter of the KL. Where KL per disturbance differs between the two
by more than TOLERANCE, the layer's loss is taken from the half. Branches cost time in proportion to the square of the
number of layers; this check makes them a quarter longer. (After the last layer's router, KL follows the square within
1 %. Before it, tokens that switch experts make KL grow with the first power, however small the disturbance: the half
then has up to twice the KL per disturbance, and so would the half of that. On the tiny model it is 1.0 to 2.1 times,
which is within the tolerance; where KL saturates it tends to 4 times.)

    schemes/00003.json        layer 3 is measured, or passed if it has no experts
    schemes/states-00004.bin  states entering layer 4, with the branches of layers 0 to 3, see branches.py
    schemes/kl.json           KL of every branch; written last

All states pass through a layer without experts, and none branches off there. Several processes deal out sequences,
probes and units of experts, and pass on what they have computed once a layer: every figure is that of one process, and
so is rank 0's file of the states. So whoever goes on with an interrupted measurement may be another number of them.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.ahead import held_ahead
from quantizers.checkpoint.held import Held, hold, layer_names
from quantizers.device.allocator import release_free_memory, use_one_arena
from quantizers.device.devices import forward_dtype
from quantizers.device.kind import accelerated
from quantizers.forward.lane import embed
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import recorded_rows
from quantizers.forward.states import Rows
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.plan.units import rows_of_block, unit_of_experts
from quantizers.system.errors import QuantizeError
from quantizers.system.files import write_json
from quantizers.system.progress import Step
from quantizers.team.shown import shown

from .branches import Branches, pass_on
from .divergence import divergences
from .measurements import FOLDER, entry_file, read_measurements
from .output_errors import ALL_THREE, SchemeErrors, scheme_errors

MEASURED_EXPERTS = 32  # of each layer, at most; their errors are scaled up to all
BFLOAT16_FACTOR = 2  # errors are enlarged by this in branches that are computed in bfloat16


def measure_schemes(job: Job, tokens: Sequence[torch.Tensor] | None, context: Context) -> list[dict[str, Any]] | None:
    """Measure all layers, or those that are left. All processes of a run call this.

    Args:
        tokens: the calibration samples (T,) int64; None in all ranks except 0.

    Returns:
        See `read_measurements`; None in all ranks except 0.

    Raises:
        QuantizeError: states or logits are not finite, or there is no room for them.
    """
    layers, work, team = job.sizes["layers"], context.work, context.team
    found = read_measurements(work, job.sizes.moe_layers) if team.leads else None
    if team.tell(found is not None):
        if team.leads:
            _remove(work)  # a walk may have been interrupted just after it wrote its last file
        return found
    use_one_arena()
    team.here.in_turn(partial((work / FOLDER).mkdir, exist_ok=True))
    source, facts = job.opened, job.facts
    outside = hold(source, (facts.embedding, facts.final_norm, facts.head))
    model = LayeredModel(outside, facts, job.sizes, context.device, forward_dtype(context.device))
    done = team.tell(next((n for n in range(layers) if not entry_file(work, n).exists()), layers))
    walk = _Walk(job, model, tokens, context, done)
    ahead = held_ahead(source, [layer_names(source, facts, number) for number in range(done, layers)], team)
    showing = shown("measuring", layers, done, context.check, team, unit="layer")
    with showing as step, contextlib.closing(ahead):
        for number in range(done, layers):
            context.check()
            measured = walk.layer if number not in job.sizes.dense else walk.dense_layer
            measured(number, next(ahead), step)
    kl = divergences(model, walk.states, walk.layout, len(job.sizes.moe_layers), context.check, team)
    if team.leads:
        write_json(work / FOLDER / "kl.json", kl)
    team.here.barrier()  # all have read the states
    if team.here.leads:
        _remove(work)
    return read_measurements(work, job.sizes.moe_layers) if team.leads else None


class _Walk:
    """The states of the source and of all branches, from layer to layer."""

    def __init__(
        self, job: Job, model: LayeredModel, tokens: Sequence[torch.Tensor] | None, context: Context, done: int
    ) -> None:
        assert job.allocation is not None
        team = context.team
        self.job, self.model, self.work, self.team, self.check = job, model, context.work, team, context.check
        self.schemes = job.allocation.candidates
        self.layout = Branches(team.tell([len(sequence) for sequence in tokens or ()]))
        self.sequences, self.probes = (team.share(len(items)) for items in (self.layout.lengths, self.layout.probes))
        if team.leads and done and not self._file(done).exists():
            raise QuantizeError(
                f"{self._file(done)}: is gone, and with it what the next layer reads; start over with --fresh"
            )
        if team.node and team.here.leads:
            _remove(self.work)  # which a kill may have left
        self.states = self._rows(done)
        if done:
            team.heads.broadcast(self.states.flat)
        else:
            self._embed(tokens)
        team.here.barrier()

        def rows(name: str, width: int, dtype: torch.dtype) -> Rows:
            return self._shared(self.work / FOLDER / f"{name}.bin", self.layout.lengths, width, dtype)

        self.recorded = recorded_rows(rows, job.sizes, model.dtype, shared=True)

    def _embed(self, tokens: Sequence[torch.Tensor] | None) -> None:
        """Fill the states that enter layer 0, once on each machine."""
        layout = self.layout
        together = torch.cat(list(tokens)) if tokens else torch.empty(sum(layout.lengths), dtype=torch.int64)
        self.team.broadcast(together)
        if self.team.here.leads:
            texts = torch.split(together, list(layout.lengths))
            probes = [texts[i][:length] for i, length in zip(layout.probes, layout.probe_lengths, strict=True)]
            embed(self.model, [*texts, *probes], self.states)

    def _file(self, layer: int) -> Path:
        return self.work / FOLDER / f"states-{layer:05d}.bin"

    def _branches(self, layer: int) -> int:
        """How many branches enter a layer."""
        return sum(number < layer for number in self.job.sizes.moe_layers)

    def _rows(self, layer: int) -> Rows:
        """States entering a layer."""
        lengths = self.layout.all_lengths(self._branches(layer))
        return self._shared(self._file(layer), lengths, self.job.sizes["hidden"], self.model.dtype)

    def _shared(self, path: Path, lengths: Sequence[int], width: int, dtype: torch.dtype) -> Rows:
        """Rows in a file that the processes of a machine have in common."""
        return self.team.here.in_turn(lambda: Rows(path, lengths, width, dtype))

    def _own(self, layer: int) -> list[int]:
        """The states entering a layer that this process takes through it."""
        runs = self.layout.runs(self.sequences, self.probes, self._branches(layer))
        return [place for run in runs for place in run]

    def dense_layer(self, number: int, source: Held, step: Step) -> None:
        """Take the source and all branches through a layer without experts.

        Args:
            source: the layer's tensors.
        """
        started, following = time.monotonic(), self._rows(number + 1)
        with self.model.layer(number, source) as layer:
            for i in self._own(number):
                following[i] = self.model.run(layer, self.states[i])[0]
                self.check()
        seconds = self._go_on(number, following, {"layer": number}, started)
        step(f"{seconds:.1f} s, no experts")

    def _go_on(self, number: int, following: Rows, entry: dict[str, Any], started: float) -> float:
        """Write what was found in a layer, once the states that leave it are on disk; the seconds since `started`."""
        pass_on(following, self.layout, self._branches(number + 1), self.team)
        seconds = time.monotonic() - started
        if self.team.leads:
            following.flush()
            seconds = time.monotonic() - started
            write_json(entry_file(self.work, number), entry | {"seconds": seconds})
        if self.team.here.leads:
            self.states.remove()
        self.states = following
        release_free_memory()
        return seconds

    def layer(self, number: int, source: Held, step: Step) -> None:
        """Measure a layer, take the source and all branches through it, and start its own branch.

        Args:
            source: the layer's tensors.
        """
        started, model, sizes = time.monotonic(), self.model, self.job.sizes
        following, own, compared = self._rows(number + 1), self._own(number), set(self.layout.probes)
        with model.layer(number, source) as layer:
            for i in own:
                residual = model.attend(layer, self.states[i])
                following[i] = residual
                if i < len(self.layout.lengths):
                    self.recorded.put(self.recorded.sequence(i), model.route(layer, residual))
                self.check()
            self.recorded.complete(self.team, self._rows_of)
            experts: Any = layer.get_submodule(self.job.facts.modules.experts)
            found = self._errors(number, experts, source)
            power = dict[int, float]()
            for i in own:
                output = model.finish(layer, following[i])[0]
                if i in compared:
                    power[i] = float(output.float().square().sum(dtype=torch.float64))
                following[i] = output
                self.check()
            disturbance = self._branch_off(number, layer, experts, found, following)
        size = sum(value for part in self.team.collect(power) for value in part.values())
        if not math.isfinite(size):
            raise QuantizeError(f"layer {number}: its output is not finite in the source itself; nothing to measure by")
        count = len(found.coarsest[0])
        share = count / sizes["experts"] * size
        errors = {str(s): {name: value / share for name, value in row.items()} for s, row in found.lost.items()}
        entry = {
            "layer": number,
            "experts": count,
            "disturbance": disturbance["all"],
            "halved": {part: disturbance[part] for part in ("some", "half")},
            "error": {scheme: row[ALL_THREE] for scheme, row in errors.items()},
            "by_matrix": {scheme: {m: row[m] for m in MATRICES} for scheme, row in errors.items()},
        }
        del found
        seconds = self._go_on(number, following, entry, started)
        step(f"{seconds:.1f} s, error {next(iter(errors.values()))[ALL_THREE] ** 0.5:.4f}")

    def _rows_of(self, rank: int) -> tuple[int, int]:
        """First and last (exclusive) row of the calibration sequences that a process takes through the layers."""
        sequences, offsets = self.team.share(len(self.layout.lengths), rank), self.recorded.x.share.offsets
        return offsets[sequences.start], offsets[sequences.stop]

    def _errors(self, number: int, experts: Any, source: Held) -> SchemeErrors:
        """What each candidate would do to a layer, of which everything is recorded."""
        job, model, recorded = self.job, self.model, self.recorded
        norm = source.tensor(job.facts.layer(number, job.facts.norm.tensor)) if job.plan.folds else None
        sizes, accelerator = job.sizes, accelerated(model.device)
        return scheme_errors(
            recorded.blocks(model.device, rows_of_block(accelerator), self.check),
            experts.gate_up_proj.data,
            experts.down_proj.data,
            norm=None if norm is None else norm.to(model.device),
            offset=job.facts.norm.offset,
            activation=experts.act_fn,
            settings=job.recipe.experts,
            schemes=self.schemes,
            experts=min(MEASURED_EXPERTS, sizes["experts"]),
            unit=unit_of_experts(accelerator, sizes["hidden"], sizes["width"]),
            compared=[recorded.at(recorded.sequence(i), model.device) for i in self.layout.probes],
            team=self.team,
        )

    def _branch_off(
        self, number: int, layer: torch.nn.Module, experts: Any, found: SchemeErrors, following: Rows
    ) -> dict[str, float]:
        """Start a layer's branch; its disturbance, see `Branches.parts`. Changes the layer's experts."""
        model, layout, count = self.model, self.layout, len(found.coarsest[0])
        enlarged = math.sqrt(self.job.sizes["experts"] / count) * (
            BFLOAT16_FACTOR if model.dtype == torch.bfloat16 else 1
        )
        exact = [w.data[:count].clone() for w in (experts.gate_up_proj, experts.down_proj)]
        halves = {layout.number_of_half(k): k for k in self.probes if k in layout.halved}
        moved, size, branch = dict[int, float](), dict[int, float](), self._branches(number) + 1
        for factor, sequences in ((enlarged, {k: k for k in self.probes}), (enlarged / 2, halves)):
            self._disturb(experts, exact, found.coarsest, factor)
            for n, k in sequences.items():
                output = model.run(layer, self.states[layout.place(0, k)])[0]
                following[layout.place(branch, n)] = output
                plain = following[layout.place(0, k)].to(output.device).float()
                moved[n] = float((output.float() - plain).square().sum(dtype=torch.float64))
                size[n] = float(plain.square().sum(dtype=torch.float64))
                self.check()
        for others_moved, others_size in self.team.collect((moved, size)):
            moved |= others_moved
            size |= others_size
        return layout.parts(moved, size)

    @staticmethod
    def _disturb(experts: Any, exact: Sequence[torch.Tensor], coarsest: Sequence[torch.Tensor], factor: float) -> None:
        """Give the first experts their own weights plus the coarsest scheme's errors times `factor`."""
        for weight, own, stored in zip((experts.gate_up_proj, experts.down_proj), exact, coarsest, strict=True):
            weight.data[: len(own)] = own.lerp(stored.to(own.device), factor)


def _remove(work: Path) -> None:
    """Delete the files that only a walk needs."""
    for path in (work / FOLDER).glob("*.bin"):
        path.unlink()
