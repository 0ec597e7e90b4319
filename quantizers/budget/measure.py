"""The pass before the run of a recipe with a budget: what each candidate scheme would cost each layer.

It walks the layers once, in the source's own states. For every layer it measures the error of the experts'
output under each candidate (scheme_errors.py), and once what such an error does to the model: some tokens go
through this layer as the coarsest candidate leaves it, then through all later layers as they are, and at the end
the KL of each such lane is read off against a lane of the source. Error and KL are both squares of a small
disturbance, so

    loss of a scheme in a layer  =  KL of the layer's lane  *  error of the scheme / disturbance of the lane

in nats per token, the disturbance being ‖lane − source‖² / ‖source‖² of the states that leave the layer. It takes the
later layers into account, which the error alone cannot. Where only some experts are measured, their errors are
enlarged, so that they disturb as much as all would. In bfloat16 lanes also differ by how their own numbers are rounded:
so the source's lane has the same shapes as the others, and errors are enlarged once more.

Whether all this is small enough is seen from every fourth sequence of a lane, which is disturbed half as much besides:
a quarter of the disturbance should leave a quarter of the KL. Where KL per disturbance differs between the two by more
than TOLERANCE, the layer's loss is that of the half. Lanes cost as much as layers squared; this makes them a quarter
longer. (After the last layer's router KL is the square to 1 %. Before it, tokens that change their expert make it grow
with the first power, however small the disturbance: the half then has up to twice the KL per disturbance, and so would
the half of that. On the tiny model 1.0 to 2.1 times, which is tolerated; KL that levels off tends to 4 times.)

    schemes/00003.json        layer 3 is measured
    schemes/states-00004.bin  states entering layer 4: of the source, then of its own lane and those of layers 0 to 3
    schemes/kl.json           KL of every lane; written last

One process measures; it goes on after a cut as the run itself does.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.logits import log_probabilities
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.background import read_ahead
from quantizers.device.allocator import give_back, settle
from quantizers.device.devices import forward_dtype
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.states import Rows
from quantizers.output.context import Context
from quantizers.plan.job import Job
from quantizers.solve.layer import LayerStores
from quantizers.system.atomic import write_json
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.progress import Step, progress

from .output_errors import ALL_THREE, scheme_errors

FOLDER = "schemes"
MOST_EXPERTS = 32  # of each layer are searched and compared; their errors are scaled up to all
LANE_TOKENS, LANE_LENGTH = 8192, 512  # tokens of a lane, and of one of its sequences, at most
BOOST = 2  # of the errors in lanes that are computed in bfloat16
HALVED = 4  # each so manieth sequence of a lane is also disturbed half as much
TOLERANCE = 2.5  # of KL per disturbance against that of the half: KL 1.6 to 10 times as large, where squares are 4
LOGIT_ROWS = 256  # positions whose logits are held at a time


def measured(work: Path, layers: int) -> list[dict[str, Any]] | None:
    """What was measured, an entry a layer; None where that is not finished.

    Each has `layer`, `seconds`, `kl` and `disturbance` of its lane, and by a scheme's name `error`, `by_matrix` (all
    three squares, relative to the states) and `loss`. `growth` is KL per disturbance over that of the half, 1 where KL
    grows with the square, None where one of them shows none; `at_half` whether the loss was taken from the half.
    """
    try:
        kl = json.loads((work / FOLDER / "kl.json").read_text())
        entries = [json.loads(_entry(work, number).read_text()) for number in range(layers)]
        return [_with_loss(entry, found) for entry, found in zip(entries, kl, strict=True)]
    except (OSError, ValueError, TypeError, KeyError):  # nothing there, or what an older version measured
        return None


def _with_loss(entry: dict[str, Any], kl: dict[str, float]) -> dict[str, Any]:
    """An entry with what follows from the KL of the layer's lane, of the sequences that are halved too, and halved."""
    errors: dict[str, float] = entry["error"]
    rate = _rate(kl["all"], entry["disturbance"])
    some, half = _rate(kl["some"], entry["halved"]["some"]), _rate(kl["half"], entry["halved"]["half"])
    growth = some / half if some and half else None
    at_half = growth is not None and not 1 / TOLERANCE <= growth <= TOLERANCE
    each = {name: (half if at_half else rate) * error for name, error in errors.items()}
    return entry | {"kl": kl["all"], "growth": growth, "at_half": at_half, "loss": each}


def _rate(kl: float, disturbance: float) -> float:
    # A layer that rounding leaves as it is, as one of zeros, loses nothing under any scheme.
    return max(kl, 0.0) / disturbance if disturbance > 0 else 0.0


def _entry(work: Path, layer: int) -> Path:
    return work / FOLDER / f"{layer:05d}.json"


def measure_schemes(job: Job, tokens: Sequence[torch.Tensor], context: Context) -> list[dict[str, Any]]:
    """Measure all layers, or those that are left.

    Args:
        tokens: the calibration samples (T,) int64.
        context: of the only process.

    Returns:
        See `measured`.

    Raises:
        QuantizeError: states or logits are not finite.
    """
    layers, work, check = job.sizes["layers"], context.work, context.check
    found = measured(work, layers)
    if found is not None:
        _remove(work)  # of a walk that was cut just after its last file
        return found
    settle()
    (work / FOLDER).mkdir(exist_ok=True)
    model = LayeredModel(job.opened, job.facts, job.sizes, context.device, forward_dtype(context.device))
    done = next((n for n in range(layers) if not _entry(work, n).exists()), layers)
    walk = _Walk(job, model, tokens, work, done)
    with progress("measuring", layers, done, "layer") as step:
        for number in range(done, layers):
            check()
            walk.layer(number, context.chunk, check, step)
    write_json(work / FOLDER / "kl.json", walk.divergences(check))
    _remove(work)
    entries = measured(work, layers)
    assert entries is not None
    return entries


class _Walk:
    """The states of the source and of all lanes, from layer to layer."""

    def __init__(self, job: Job, model: LayeredModel, tokens: Sequence[torch.Tensor], work: Path, done: int) -> None:
        assert job.allocation is not None
        self.job, self.model, self.work = job, model, work
        self.schemes = job.allocation.candidates
        self.lengths = [len(t) for t in tokens]
        self.probes = lane_sequences(self.lengths)
        self.halved = range(0, len(self.probes), HALVED)
        self.lane_lengths = [min(self.lengths[i], LANE_LENGTH) for i in self.probes]
        if done and not self._file(done).exists():
            raise QuantizeError(f"{self._file(done)}: is gone, and with it what the next layer reads; use --fresh")
        self.states = self._rows(done)
        if done == 0:
            table = model.embedding()
            for i, sequence in enumerate(tokens):
                self.states[i] = table[sequence.to(model.device)]
            for k, i in enumerate(self.probes):
                self.states[self._place(0, k)] = self.states[i][: self.lane_lengths[k]]
        chosen = job.sizes["chosen"]
        folder = work / FOLDER
        self.stores = LayerStores(
            Rows(folder / "x.bin", self.lengths, job.sizes["hidden"], model.dtype),
            Rows(folder / "chosen.bin", self.lengths, chosen, torch.int32),
            Rows(folder / "weight.bin", self.lengths, chosen, torch.float32),
        )

    def _file(self, layer: int) -> Path:
        return self.work / FOLDER / f"states-{layer:05d}.bin"

    def _place(self, lane: int, number: int) -> int:
        """Where a lane's n-th sequence lies; lane 0 is the source's, lane l + 1 that of layer l, the halved last."""
        before = len(self.halved) * max(lane - 1, 0)
        return len(self.lengths) + lane * len(self.probes) + before + number

    def _sequences(self, lane: int) -> list[tuple[int, int]]:
        """Of a layer's lane: which of the probes each sequence is, and where it lies."""
        probes = [*range(len(self.probes)), *self.halved]
        return [(k, self._place(lane, n)) for n, k in enumerate(probes)]

    def _rows(self, layer: int) -> Rows:
        """States entering a layer: the source's sequences, then the lanes that there are by then."""
        lane = [*self.lane_lengths, *(self.lane_lengths[k] for k in self.halved)]
        lengths = [*self.lengths, *self.lane_lengths, *lane * layer]
        return Rows(self._file(layer), lengths, self.job.sizes["hidden"], self.model.dtype)

    def layer(self, number: int, chunk: int, check: Callable[[], None], step: Step) -> None:
        """Measure a layer; take the source and all lanes through it; begin its own lane."""
        started, model, facts = time.monotonic(), self.model, self.job.facts
        following = self._rows(number + 1)
        ahead = []
        if number + 1 < self.job.sizes["layers"]:
            ahead = [model.checkpoint.tensors[action.source] for action in self.job.plan.of_layer(number + 1)]
        with model.layer(number) as layer, read_ahead(ahead):
            for i in range(len(self.lengths)):
                seen = model.record(layer, self.states[i])
                self.stores.x[i], self.stores.chosen[i], self.stores.weight[i] = seen.x, seen.chosen, seen.weight
                check()
            experts: Any = layer.get_submodule(facts.modules.experts)
            norm = model.checkpoint.tensor(facts.layer(number, facts.fold.norm)).to(model.device)
            count = min(MOST_EXPERTS, self.job.sizes["experts"])
            found = scheme_errors(
                self.stores.recorded(model.device, check),
                experts.gate_up_proj.data,
                experts.down_proj.data,
                norm=norm,
                activation=experts.act_fn,
                settings=self.job.recipe.experts,
                schemes=self.schemes,
                experts=count,
                chunk=min(chunk, count),
                compared=self.probes,
            )
            power, compared = 0.0, set(self.probes)
            for i in range(len(self.states)):
                output = model.run(layer, self.states[i])[0]
                if i in compared:
                    power += float(output.float().square().sum(dtype=torch.float64))
                following[i] = output
                check()
            enlarged = math.sqrt(self.job.sizes["experts"] / count) * (BOOST if model.dtype == torch.bfloat16 else 1)
            exact = [w.data[:count].clone() for w in (experts.gate_up_proj, experts.down_proj)]
            moved, size = list[float](), list[float]()
            for n, (k, place) in enumerate(self._sequences(number + 1)):
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
        disturbance = self._parts(moved, size)
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
        write_json(_entry(self.work, number), entry)
        self.states.path.unlink()
        self.states = following
        del found
        give_back()
        step(f"{entry['seconds']:.1f} s, error {next(iter(errors.values()))[ALL_THREE] ** 0.5:.4f}")

    @staticmethod
    def _disturb(
        experts: Any, exact: Sequence[torch.Tensor], coarsest: Sequence[torch.Tensor], enlarged: float
    ) -> None:
        """Give the first experts their own weights with the coarsest scheme's errors, so many times enlarged."""
        for weight, own, stored in zip((experts.gate_up_proj, experts.down_proj), exact, coarsest, strict=True):
            weight.data[: len(own)] = own.lerp(stored.to(own.device), enlarged)

    def _parts(self, values: Sequence[float], sizes: Sequence[float]) -> dict[str, float]:
        """Σ values / Σ sizes of a lane's sequences: of all, of those that are halved too, and of these halved."""
        parts = {"all": range(len(self.probes)), "some": self.halved, "half": range(len(self.probes), len(values))}
        totals = {name: (sum(values[n] for n in part), sum(sizes[n] for n in part)) for name, part in parts.items()}
        return {name: value / size if size > 0 else 0.0 for name, (value, size) in totals.items()}

    def divergences(self, check: Callable[[], None]) -> list[dict[str, float]]:
        """Mean KL(source || lane) of each layer's lane in nats, see `_parts`."""
        head = self.model.head()
        lanes = [self._sequences(1 + number) for number in range(self.job.sizes["layers"])]
        totals = [[0.0] * len(lane) for lane in lanes]
        for k in range(len(self.probes)):
            source = self.states[self._place(0, k)]
            others = [
                (total, n, self.states[place])
                for total, lane in zip(totals, lanes, strict=True)
                for n, (probe, place) in enumerate(lane)
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
        rows_of = [self.lane_lengths[k] for k, _ in self._sequences(0)]
        return [self._parts(total, rows_of) for total in totals]


def _remove(work: Path) -> None:
    """The files that only a walk needs."""
    for path in (work / FOLDER).glob("*.bin"):
        path.unlink()


def lane_sequences(lengths: Sequence[int]) -> list[int]:
    """Numbers of the sequences whose beginnings are the lanes' tokens: evenly spread, LANE_TOKENS in all about."""
    total = sum(min(length, LANE_LENGTH) for length in lengths)
    step = max(1, round(total / LANE_TOKENS))
    return list(range(0, len(lengths), step))


def lane_rows(lengths: Sequence[int], layers: int) -> int:
    """Tokens of all lanes together, for the room that they need on the disk."""
    lane = [min(lengths[i], LANE_LENGTH) for i in lane_sequences(lengths)]
    return sum(lane) + layers * (sum(lane) + sum(lane[::HALVED]))


def refuse_processes(count: int, work: Path, layers: int) -> None:
    """A budget is measured by one process.

    Raises:
        InputError: there are several, and nothing is measured yet.
    """
    if count > 1 and measured(work, layers) is None:
        raise InputError(
            f"{work.parent}: a budget is measured by one process, and {count} were started; give the command once "
            "without torchrun until it quantizes, then go on with all of them"
        )
