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
    schemes/states-00004.bin  states entering layer 4: the source's, the source's at the branches' tokens, then the
                              branches of layers 0 to 3
    schemes/kl.json           KL of every branch; written last

All states pass through a layer without experts, and none branches off there. One process measures. An interrupted
measurement resumes as the run itself does.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.logits import log_probabilities
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.held import Held, held_ahead, hold, layer_names
from quantizers.device.allocator import release_free_memory, use_one_arena
from quantizers.device.devices import forward_dtype
from quantizers.device.kind import accelerated
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import recorded_rows
from quantizers.forward.states import Rows
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.plan.units import rows_of_block, unit_of_experts
from quantizers.system.atomic import write_json
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.progress import Step, progress

from .measurements import FOLDER, entry_file, read_measurements
from .output_errors import ALL_THREE, scheme_errors

MEASURED_EXPERTS = 32  # of each layer, at most; their errors are scaled up to all
BRANCH_TOKENS, BRANCH_LENGTH = 8192, 512  # tokens of a branch, and of one of its sequences, at most
BFLOAT16_FACTOR = 2  # errors are enlarged by this in branches that are computed in bfloat16
HALF_EVERY = 4  # every fourth sequence of a branch is also run with half the error
LOGIT_ROWS = 256  # positions whose logits are held at a time


def measure_schemes(job: Job, tokens: Sequence[torch.Tensor], context: Context) -> list[dict[str, Any]]:
    """Measure all layers, or those that are left.

    Args:
        tokens: the calibration samples (T,) int64.
        context: of the only process.

    Returns:
        See `read_measurements`.

    Raises:
        QuantizeError: states or logits are not finite.
    """
    layers, work, check = job.sizes["layers"], context.work, context.check
    found = read_measurements(work, job.sizes.moe_layers)
    if found is not None:
        _remove(work)  # a walk may have been interrupted just after it wrote its last file
        return found
    use_one_arena()
    (work / FOLDER).mkdir(exist_ok=True)
    source, facts = job.opened, job.facts
    outside = hold(source, (facts.embedding, facts.final_norm, facts.head))
    model = LayeredModel(outside, facts, job.sizes, context.device, forward_dtype(context.device))
    done = next((n for n in range(layers) if not entry_file(work, n).exists()), layers)
    walk = _Walk(job, model, tokens, work, done)
    ahead = held_ahead(source, [layer_names(source, facts, number) for number in range(done, layers)])
    with progress("measuring", layers, done, "layer") as step, contextlib.closing(ahead):
        for number in range(done, layers):
            check()
            measured = walk.layer if number not in job.sizes.dense else walk.dense_layer
            measured(number, next(ahead), check, step)
    write_json(work / FOLDER / "kl.json", walk.divergences(check))
    _remove(work)
    entries = read_measurements(work, job.sizes.moe_layers)
    assert entries is not None
    return entries


class _Walk:
    """The states of the source and of all branches, from layer to layer."""

    def __init__(self, job: Job, model: LayeredModel, tokens: Sequence[torch.Tensor], work: Path, done: int) -> None:
        assert job.allocation is not None
        self.job, self.model, self.work = job, model, work
        self.schemes = job.allocation.candidates
        self.lengths = [len(t) for t in tokens]
        self.probes = branch_sequences(self.lengths)
        self.halved = range(0, len(self.probes), HALF_EVERY)
        self.branch_lengths = [min(self.lengths[i], BRANCH_LENGTH) for i in self.probes]
        if done and not self._file(done).exists():
            raise QuantizeError(
                f"{self._file(done)}: is gone, and with it what the next layer reads; start over with --fresh"
            )
        self.states = self._rows(done)
        if done == 0:
            table = model.embedding()
            for i, sequence in enumerate(tokens):
                self.states[i] = table[sequence.to(model.device)]
            for k, i in enumerate(self.probes):
                self.states[self._place(0, k)] = self.states[i][: self.branch_lengths[k]]

        def rows(name: str, width: int, dtype: torch.dtype) -> Rows:
            return Rows(work / FOLDER / f"{name}.bin", self.lengths, width, dtype)

        self.recorded = recorded_rows(rows, job.sizes, model.dtype)

    def _file(self, layer: int) -> Path:
        return self.work / FOLDER / f"states-{layer:05d}.bin"

    def _place(self, branch: int, number: int) -> int:
        """Where a branch's n-th sequence lies, halves last: branch 0 is the source's, then come layers with experts."""
        before = len(self.halved) * max(branch - 1, 0)
        return len(self.lengths) + branch * len(self.probes) + before + number

    def _sequences(self, branch: int) -> list[tuple[int, int]]:
        """The sequences of a branch: which of the probes each one is, and where it lies."""
        probes = [*range(len(self.probes)), *self.halved]
        return [(k, self._place(branch, n)) for n, k in enumerate(probes)]

    def _rows(self, layer: int) -> Rows:
        """States entering a layer: the source's sequences, then the branches of the layers before it."""
        branch = [*self.branch_lengths, *(self.branch_lengths[k] for k in self.halved)]
        before = sum(number < layer for number in self.job.sizes.moe_layers)
        lengths = [*self.lengths, *self.branch_lengths, *branch * before]
        return Rows(self._file(layer), lengths, self.job.sizes["hidden"], self.model.dtype)

    def dense_layer(self, number: int, source: Held, check: Callable[[], None], step: Step) -> None:
        """Take the source and all branches through a layer without experts.

        Args:
            source: the layer's tensors.
        """
        started, following = time.monotonic(), self._rows(number + 1)
        with self.model.layer(number, source) as layer:
            for i in range(len(self.states)):
                following[i] = self.model.run(layer, self.states[i])[0]
                check()
        following.flush()
        seconds = time.monotonic() - started
        write_json(entry_file(self.work, number), {"layer": number, "seconds": seconds})
        self._go_on(following)
        step(f"{seconds:.1f} s, no experts")

    def _go_on(self, following: Rows) -> None:
        self.states.remove()
        self.states = following
        release_free_memory()

    def layer(self, number: int, source: Held, check: Callable[[], None], step: Step) -> None:
        """Measure a layer, take the source and all branches through it, and start its own branch.

        Args:
            source: the layer's tensors.
        """
        started, model, facts = time.monotonic(), self.model, self.job.facts
        following = self._rows(number + 1)
        with model.layer(number, source) as layer:
            for i in range(len(self.states)):
                residual = model.attend(layer, self.states[i])
                following[i] = residual
                if i < len(self.lengths):
                    self.recorded.put(self.recorded.sequence(i), model.route(layer, residual))
                check()
            experts: Any = layer.get_submodule(facts.modules.experts)
            norm = (
                source.tensor(facts.layer(number, facts.norm.tensor)).to(model.device) if self.job.plan.folds else None
            )
            sizes, accelerator = self.job.sizes, accelerated(model.device)
            count = min(MEASURED_EXPERTS, sizes["experts"])
            found = scheme_errors(
                self.recorded.blocks(model.device, rows_of_block(accelerator), check),
                experts.gate_up_proj.data,
                experts.down_proj.data,
                norm=norm,
                offset=facts.norm.offset,
                activation=experts.act_fn,
                settings=self.job.recipe.experts,
                schemes=self.schemes,
                experts=count,
                unit=unit_of_experts(accelerator, sizes["hidden"], sizes["width"]),
                compared=[self.recorded.at(self.recorded.sequence(i), model.device) for i in self.probes],
            )
            power, compared = 0.0, set(self.probes)
            for i in range(len(self.states)):
                output = model.finish(layer, following[i])[0]
                if i in compared:
                    power += float(output.float().square().sum(dtype=torch.float64))
                following[i] = output
                check()
            enlarged = math.sqrt(self.job.sizes["experts"] / count) * (
                BFLOAT16_FACTOR if model.dtype == torch.bfloat16 else 1
            )
            exact = [w.data[:count].clone() for w in (experts.gate_up_proj, experts.down_proj)]
            moved, size = list[float](), list[float]()
            for n, (k, place) in enumerate(self._sequences(1 + self.job.sizes.moe_layers.index(number))):
                if n in (0, len(self.probes)):
                    self._disturb(experts, exact, found.coarsest, enlarged if n == 0 else enlarged / 2)
                output = model.run(layer, self.states[self._place(0, k)])[0]
                following[place] = output
                plain = following[self._place(0, k)].to(output.device).float()
                moved.append(float((output.float() - plain).square().sum(dtype=torch.float64)))
                size.append(float(plain.square().sum(dtype=torch.float64)))
                check()
        if not math.isfinite(power):
            raise QuantizeError(f"layer {number}: its output is not finite in the source itself; nothing to measure by")
        share = count / self.job.sizes["experts"] * power
        errors = {str(s): {name: value / share for name, value in row.items()} for s, row in found.lost.items()}
        disturbance = self.parts(moved, size)
        following.flush()
        entry = {
            "layer": number,
            "experts": count,
            "disturbance": disturbance["all"],
            "halved": {part: disturbance[part] for part in ("some", "half")},
            "error": {scheme: row[ALL_THREE] for scheme, row in errors.items()},
            "by_matrix": {scheme: {m: row[m] for m in MATRICES} for scheme, row in errors.items()},
            "seconds": time.monotonic() - started,
        }
        write_json(entry_file(self.work, number), entry)
        del found
        self._go_on(following)
        step(f"{entry['seconds']:.1f} s, error {next(iter(errors.values()))[ALL_THREE] ** 0.5:.4f}")

    @staticmethod
    def _disturb(experts: Any, exact: Sequence[torch.Tensor], coarsest: Sequence[torch.Tensor], factor: float) -> None:
        """Give the first experts their own weights plus the coarsest scheme's errors times `factor`."""
        for weight, own, stored in zip((experts.gate_up_proj, experts.down_proj), exact, coarsest, strict=True):
            weight.data[: len(own)] = own.lerp(stored.to(own.device), factor)

    def parts(self, values: Sequence[float], sizes: Sequence[float]) -> dict[str, float]:
        """Σ values / Σ sizes of a branch: of `all` sequences, of `some` also run with half the error, and `half`."""
        parts = {"all": range(len(self.probes)), "some": self.halved, "half": range(len(self.probes), len(values))}
        totals = {name: (sum(values[n] for n in part), sum(sizes[n] for n in part)) for name, part in parts.items()}
        return {name: value / size if size > 0 else 0.0 for name, (value, size) in totals.items()}

    def divergences(self, check: Callable[[], None]) -> list[dict[str, float]]:
        """Mean KL(source || branch) of each layer's branch in nats, see `parts`."""
        head = self.model.head()
        branches = [self._sequences(1 + place) for place in range(len(self.job.sizes.moe_layers))]
        totals = [[0.0] * len(branch) for branch in branches]
        for k in range(len(self.probes)):
            source = self.states[self._place(0, k)]
            others = [
                (total, n, self.states[place])
                for total, branch in zip(totals, branches, strict=True)
                for n, (probe, place) in enumerate(branch)
                if probe == k
            ]
            for start in range(0, len(source), LOGIT_ROWS):
                rows = slice(start, start + LOGIT_ROWS)
                expected = log_probabilities(self.model.final(source[rows]), head)
                for total, n, states in others:
                    log = log_probabilities(self.model.final(states[rows]), head)
                    total[n] += float((expected.exp() * (expected - log)).sum(dtype=torch.float64))
                check()
        if not all(math.isfinite(value) for total in totals for value in total):
            raise QuantizeError("the model's logits are not finite on the calibration texts; nothing can be compared")
        rows_of = [self.branch_lengths[k] for k, _ in self._sequences(0)]
        return [self.parts(total, rows_of) for total in totals]


def _remove(work: Path) -> None:
    """Delete the files that only a walk needs."""
    for path in (work / FOLDER).glob("*.bin"):
        path.unlink()


def branch_sequences(lengths: Sequence[int]) -> list[int]:
    """Numbers of the sequences whose beginnings branch off: evenly spread, about BRANCH_TOKENS tokens in all."""
    total = sum(min(length, BRANCH_LENGTH) for length in lengths)
    step = max(1, round(total / BRANCH_TOKENS))
    return list(range(0, len(lengths), step))


def branch_rows(lengths: Sequence[int], layers: int) -> int:
    """Tokens of all branches together, which need room on the disk; `layers` counts those with experts."""
    branch = [min(lengths[i], BRANCH_LENGTH) for i in branch_sequences(lengths)]
    return sum(branch) + layers * (sum(branch) + sum(branch[::HALF_EVERY]))


def refuse_processes(count: int, work: Path, layers: Sequence[int]) -> None:
    """A budget is measured by one process.

    Args:
        layers: the numbers of those with experts.

    Raises:
        InputError: there are several, and nothing is measured yet.
    """
    if count > 1 and read_measurements(work, layers) is None:
        raise InputError(
            f"{work.parent}: a budget is measured by one process, and {count} were started; give the command once "
            "without torchrun until it quantizes, then go on with all of them"
        )
