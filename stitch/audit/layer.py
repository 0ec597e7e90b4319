"""Audit of one layer against its source: passthrough bytes, closure of the fold, closeness of every expert.

Both are read through the same interface, from files or from memory during a run.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import split_first
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import is_accelerator
from quantizers.device.prefetch import to_host
from quantizers.formats.conversion import converted
from quantizers.formats.dequantization import read_weight
from quantizers.formats.lossless import difference
from quantizers.formats.nvfp4 import GLOBAL_SCALE, INPUT_SCALE
from quantizers.model.layer_weights import ExpertWeights
from quantizers.planning.expert_batches import expert_batches, experts_per_batch
from quantizers.planning.plan import PASSTHROUGH, Action, Plan
from quantizers.solve.folded_scales import close_enough, is_uncompensated, matrix_errors, norm_ratio, router_state
from quantizers.system.errors import CheckpointError

ROUTER_ULPS = 2
UNSCALED = 0.9  # a matrix is not scaled as its norm was if its error is less than so much of it without the ratio
NOT_COMPENSATED = "not compensated, though"
WITHOUT_A_FOLD = "quantize again without scales in this norm"


@dataclass
class LayerAudit:
    """The result for one layer, or for the tensors outside the layers."""

    tensors: int = 0  # of the source, accounted for
    kept: int = 0  # compared byte for byte
    converted: int = 0  # compared with what the formula makes of the source's
    values: int = 0  # in those, where experts are converted and each value was compared
    differences: list[str] = field(default_factory=list)  # one line each, starting with the tensor's name
    # The largest relative error of a matrix after folding; None outside the layers, and if norms cannot be compared.
    weight_error: float | None = None
    by_expert: list[float | None] = field(default_factory=list)  # the same; None if unreadable, or without finite norm

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)


def written_from(actions: Sequence[Action], values: int = 0) -> LayerAudit:
    """The audit of a shard whose passthrough tensors were compared when it was written, see `write_shard`.

    So were `values` of matrices that are converted.
    """
    kinds = Counter(action.kind for action in actions)
    return LayerAudit(len(actions), sum(kinds[kind] for kind in PASSTHROUGH), kinds["convert"], values)


def audit_kept(
    plan: Plan, layer: int | None, source: Checkpoint, candidate: Checkpoint, device: torch.device
) -> LayerAudit:
    """The audit of a shard's tensors that pass through, by SHA-256, and of modules that are converted, on `device`:
    by the formula, applied again, or value by value where experts are converted.
    """
    actions = plan.of_layer(layer)
    audit = LayerAudit(len(actions))
    for action in actions:
        missing = not action.outputs.keys() <= candidate.tensors.keys()  # which is reported
        if missing or action.kind not in (*PASSTHROUGH, "convert"):
            continue
        if action.kind == "convert" and action.module is not None:
            audit.converted += 1
            if plan.experts.convert is not None:
                audit.differences += unequal_values(action.module, source, candidate, device)
                audit.values += math.prod(action.shape)
                continue
            with _reading_the_source():
                made = converted(source, action.module, plan.attention, device)
            audit.differences += [
                f"{name}: is not what `attention: {plan.attention}` makes of the source's"
                for name, tensor in made.items()
                if not torch.equal(tensor.cpu().view(torch.uint8), candidate.tensor(name).view(torch.uint8))
            ]
        else:
            audit.kept += 1
            (name,) = action.outputs
            if source.sha256(action.source) != candidate.sha256(name):
                audit.differences.append(f"{name}: bytes differ from the source's {action.source}")
    return audit


def unequal_values(module: str, source: Checkpoint, candidate: Checkpoint, device: torch.device) -> Iterator[str]:
    """The first value of a module's matrix, row by row, that is not the source's: one line, or none."""
    with _reading_the_source():
        before = read_weight(source, module, device)
    try:
        after = read_weight(candidate, module, device)
    except CheckpointError as failure:
        yield f"{module}: {failure}"
        return
    if before.shape != after.shape:
        yield f"{module}: has shape {list(after.shape)}, the source's {list(before.shape)}"
    elif (first := difference(after, before)) is not None:
        yield (
            f"{module}.weight: row {first.row}, column {first.column} is {first.stored:.9g}, the source's is "
            f"{first.wanted:.9g}; a conversion changes no value"
        )


def audit_layer(
    layer: int,
    facts: Architecture,
    source: Checkpoint,
    candidate: Checkpoint,
    *,
    bits: int,
    device: torch.device,
    audit: LayerAudit,
) -> None:
    """Closure: the router must carry the inverse of the norm's change, and every expert, of `bits`, must match it.

    For a passthrough norm and router `audit_kept` compares the bytes, and the ratio is 1. A layer without experts has
    no closure. Weights are dequantized on `device`; what is found is added to `audit`.

    Raises:
        CheckpointError: the source is damaged. Damage to the candidate is a difference.
    """
    if layer in facts.dense or facts.layer(layer, facts.router.tensor) not in candidate.tensors:
        return
    smooth: torch.Tensor | None = torch.ones(1, device=device)
    if facts.norm is not None:
        smooth = _ratio(facts.layer(layer, facts.norm.tensor), facts.norm.offset, source, candidate, device, audit)
    if smooth is None:
        return
    pair = _Pair(layer, facts, source, candidate, smooth, bits)
    audit.differences += [*_router_differences(pair), *_other_readers(pair), *_zero_scales(pair)]
    audit.differences += global_scales(layer, facts, candidate)
    for expert, errors in enumerate(_errors(pair)):
        if isinstance(errors, str):
            audit.differences.append(errors)
            audit.by_expert.append(None)
            continue
        audit.by_expert.append(max(filter(math.isfinite, errors), default=None))
        for matrix, error in zip(facts.matrices, errors, strict=True):
            if not error < close_enough(bits):
                problem = f"{error:.0%} away from the source's matrix times the norm's ratio"
                if math.isinf(error):
                    problem = "closer to the source's matrix without the norm's ratio than with it"
                audit.differences.append(
                    f"{facts.expert(layer, expert, matrix)}.weight_packed: {problem}; "
                    "it was not scaled as its norm was, or is another matrix"
                )
    audit.weight_error = max((error for error in audit.by_expert if error is not None), default=0.0)


def _ratio(
    name: str, offset: int, source: Checkpoint, candidate: Checkpoint, device: torch.device, audit: LayerAudit
) -> torch.Tensor | None:
    """The ratio (H,) of both norms; None if they cannot be compared, which is a difference if one is there."""
    if name not in candidate.tensors:
        return None
    before, after = (checkpoint.tensor(name).to(device) for checkpoint in (source, candidate))
    broken = ~torch.isfinite(after.float()).all()
    zeros = ((before == 0) != (after == 0)).any() if before.shape == after.shape else broken
    seen = to_host({"broken": broken, "zeros": zeros})
    if before.shape != after.shape or seen["broken"]:
        audit.differences.append(f"{name}: is not finite, or has another shape than the source's")
        return None
    if seen["zeros"]:
        audit.differences.append(f"{name}: zero where the source is not, or vice versa")
    return norm_ratio(before, after, offset)


@dataclass(frozen=True)
class _Pair:
    """A layer of the source and of the candidate."""

    layer: int
    facts: Architecture
    source: Checkpoint
    candidate: Checkpoint
    smooth: torch.Tensor  # the ratio (H,) of its norms, on the device that computes; 1 (1,) where nothing can be folded
    bits: int

    def errors(self, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> torch.Tensor:
        """`matrix_errors` of some experts; infinite for a matrix that is closer to the source's without the ratio."""
        inner = self.facts.of_layer(self.layer).inner
        errors = matrix_errors(old, new, self.smooth, inner=inner)
        if self.bits >= 4:
            return errors  # a wrong ratio is further away than `close_enough` allows
        unscaled = matrix_errors(old, new, torch.ones_like(self.smooth), inner=inner)
        return torch.where(unscaled < UNSCALED * errors, torch.inf, errors)

    def was_divided(self) -> str:
        """Phrase on the divided norm, for every message about a tensor that reads it."""
        assert self.facts.norm is not None, "without a norm, nothing is divided"
        divided = f"{int((self.smooth != 1).sum())} of {len(self.smooth)} channels"
        return f"{NOT_COMPENSATED} {self.facts.layer(self.layer, self.facts.norm.tensor)} was divided in {divided}"


def _errors(pair: _Pair) -> Sequence[list[float] | str]:
    """Errors of each expert's matrices, in batches; one by one, with why it cannot be read, if any of them cannot."""
    by_batch, device = list[torch.Tensor](), pair.smooth.device
    of_layer = (pair.facts, pair.layer, device, torch.float32)
    with _reading_the_source():
        old = ExpertWeights(pair.source, *of_layer)
    try:
        new = ExpertWeights(pair.candidate, *of_layer)
        size = experts_per_batch(is_accelerator(device), old.hidden, old.width)
        for first, last in expert_batches(old.experts, size):
            # The previous batch is freed after this one is read, so that a CPU's memory is reused, not returned.
            with _reading_the_source():
                source = _matrices(*old.batch(range(first, last)), len(pair.facts.matrices))
            candidate = _matrices(*new.batch(range(first, last)), len(pair.facts.matrices))
            by_batch.append(pair.errors(source, candidate))
        with _reading_the_source():
            old.require_finite()
        new.require_finite()
    except BrokenSource:
        raise
    except CheckpointError:
        return list(_one_by_one(pair))
    errors: list[list[float]] = torch.cat(by_batch).tolist()
    return errors


class BrokenSource(CheckpointError):
    """The source cannot be read."""


@contextlib.contextmanager
def _reading_the_source() -> Iterator[None]:
    try:
        yield
    except CheckpointError as failure:
        raise BrokenSource("", f"the source is damaged: {failure.without_remedy}", failure.remedy) from None


def _matrices(gate_up: torch.Tensor, down: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    return (*split_first(gate_up, count), down)


def _one_by_one(pair: _Pair) -> Iterator[list[float] | str]:
    for expert in range(pair.facts.num_experts):
        modules = [pair.facts.expert(pair.layer, expert, matrix) for matrix in pair.facts.matrices]
        with _reading_the_source():
            old = [read_weight(pair.source, module, pair.smooth.device) for module in modules]
        try:
            new = [read_weight(pair.candidate, module, pair.smooth.device) for module in modules]
            for module, before, after in zip(modules, old, new, strict=True):
                if before.shape != after.shape:
                    shapes = f"has shape {list(after.shape)}, the source's {list(before.shape)}"
                    raise CheckpointError(module, shapes)
        except CheckpointError as failure:
            yield f"{modules[0].rpartition('.')[0]}: {failure}"
        else:
            yield pair.errors(old, new).tolist()


def _router_differences(pair: _Pair) -> Iterator[str]:
    """Differences of the router from the source's times the ratio, rounded once to its stored dtype."""
    if not pair.facts.router_follows:
        return  # it keeps its bytes, which `audit_kept` compares
    name, smooth = pair.facts.layer(pair.layer, pair.facts.router.tensor), pair.smooth
    before, after = (checkpoint.tensor(name).to(smooth.device) for checkpoint in (pair.source, pair.candidate))
    if before.shape != after.shape:
        yield f"{name}: has shape {list(after.shape)}, the source's {list(before.shape)}"
        return
    expected = before.float() * smooth
    ulp = torch.nextafter(expected.abs(), expected.new_full((), torch.inf)) - expected.abs()
    least, most = ((expected + sign * ROUTER_ULPS * ulp).to(after.dtype) for sign in (-1, 1))
    off = ~((least <= after) & (after <= most))
    if not bool(off.any()):
        return
    if router_state(before, after, smooth) == "not compensated":
        repair = "repair it with `quantize stitch --experts THIS --repair-router`"
        remedy = WITHOUT_A_FOLD if pair.facts.also_reads_the_norm else repair
        yield f"{name}: {pair.was_divided()}: the router chooses other experts than the source's; {remedy}"
    else:
        yield (
            f"{name}: {int(off.sum())} elements differ from the source's times the norm's ratio by more than "
            f"{ROUTER_ULPS} ulp of float32"
        )


def _zero_scales(pair: _Pair) -> Iterator[str]:
    """Group scales of zero, which lose all weights of the group; negative scales are as good as positive ones."""
    experts = range(pair.facts.num_experts)
    modules = (pair.facts.expert(pair.layer, e, matrix) for e in experts for matrix in pair.facts.matrices)
    names = [name for module in modules if (name := f"{module}.weight_scale") in pair.candidate.tensors]
    counts = [(pair.candidate.tensor(name) == 0).sum() for name in names]
    for name, count in zip(names, torch.stack(counts).tolist() if counts else (), strict=True):
        if count:
            yield f"{name}: {count} of its group scales are zero: these weights are lost"


def global_scales(layer: int, facts: Architecture, candidate: Checkpoint) -> Iterator[str]:
    """Global scales that are not positive and finite, or differ between gate and up: servers take gate's for both."""
    for part in (GLOBAL_SCALE, INPUT_SCALE):
        for expert in range(facts.num_experts):
            names = [f"{facts.expert(layer, expert, matrix)}.{part}" for matrix in facts.matrices]
            scales = [candidate.tensor(name).item() for name in names if name in candidate.tensors]
            yield from (
                f"{name}: {value} is no positive number: what it scales is lost"
                for name, value in zip(names, scales, strict=False)
                if not 0 < value < math.inf
            )
            if scales[2:] and scales[0] != scales[1]:
                yield f"{names[1]}: is not that of {names[0]}, which servers take for both"


def _other_readers(pair: _Pair) -> Iterator[str]:
    """Other readers of a divided norm that were not multiplied; llm-compressor 0.14 omits GLM-4.x's shared experts."""
    if not pair.facts.also_reads_the_norm or not bool((pair.smooth != 1).any()):
        return
    left: list[str] = []
    for reader in pair.facts.also_reads_the_norm:
        try:
            if _is_left(pair, reader):
                left.append(reader)
        except BrokenSource:
            raise
        except CheckpointError as failure:
            yield str(failure)
    if left:
        yield (
            f"{pair.facts.layer(pair.layer, left[0])}: {pair.was_divided()}: {' and '.join(left)} read it and have the "
            f"source's numbers; repairing this would change passthrough bytes; {WITHOUT_A_FOLD}"
        )


def _is_left(pair: _Pair, reader: str) -> bool:
    """Whether a reader of the norm has the source's numbers; the residual stream always has."""
    if reader == "residual":
        return True
    facts, smooth = pair.facts, pair.smooth
    linear = reader in facts.of_layer(pair.layer).linears
    name = reader if reader in facts.outside else facts.layer(pair.layer, reader)
    if not linear and name not in pair.candidate.tensors:
        return False  # reported as missing

    def numbers(checkpoint: Checkpoint) -> torch.Tensor:
        return read_weight(checkpoint, name, smooth.device) if linear else checkpoint.tensor(name).to(smooth).float()

    with _reading_the_source():
        before = numbers(pair.source)
    after = numbers(pair.candidate)
    if before.shape[-1:] != smooth.shape:  # not (…, H): nothing is known of its columns
        return torch.equal(before, after)
    return before.shape == after.shape and is_uncompensated(before, after, smooth)
