"""Audits one layer of a checkpoint against its source: kept bytes, closure of the fold, closeness of every expert.

It reads both through the same interface, so the layer may lie in files, or in memory while a run has it there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.kind import accelerated
from quantizers.forward.smoothing import CLOSE_ENOUGH, matrix_errors, norm_ratio, router_state
from quantizers.forward.weights import ExpertWeights, read_weight
from quantizers.plan.plan import KEPT, Action
from quantizers.plan.units import unit_of_experts, units_of
from quantizers.system.errors import CheckpointError

ROUTER_ULPS = 2
NOT_COMPENSATED = "not compensated, though"


@dataclass
class LayerAudit:
    """What was found in one layer, or outside the layers.

    Attributes:
        tensors: source tensors accounted for.
        kept: tensors compared byte for byte.
        differences: one line each, starting with the tensor's name.
        weight_error: the largest relative error of an expert's matrix after folding; None outside the layers, and
            where the norms cannot be compared.
        by_expert: the same of each expert; None for one that cannot be read, or whose weights have no finite norm.
    """

    tensors: int = 0
    kept: int = 0
    differences: list[str] = field(default_factory=list)
    weight_error: float | None = None
    by_expert: list[float | None] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)


def written_from(actions: Sequence[Action]) -> LayerAudit:
    """Of a shard whose kept tensors were compared when it was written, see `stitch.write.shard.write_shard`."""
    return LayerAudit(len(actions), sum(action.kind in KEPT for action in actions))


def audit_kept(actions: Sequence[Action], source: Checkpoint, candidate: Checkpoint, audit: LayerAudit) -> None:
    """Account for a layer's tensors, and compare those that keep their bytes, by SHA-256."""
    audit.tensors += len(actions)
    for action in actions:
        if action.kind in KEPT:
            (name,) = action.outputs
            if name not in candidate.tensors:
                continue  # already reported as missing
            audit.kept += 1
            if source.sha256(action.source) != candidate.sha256(name):
                audit.differences.append(f"{name}: bytes differ from the source's {action.source}")


def audit_layer(
    layer: int,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    *,
    device: torch.device,
    audit: LayerAudit,
) -> None:
    """Closure: the router must carry the inverse of the norm's change, and every expert must agree with it.

    Where norm and router are kept, `audit_kept` compares their bytes; the ratio is then 1. A layer without experts has
    nothing to close.

    Args:
        device: where weights are dequantized.
        audit: findings are added here.

    Raises:
        CheckpointError: the source is broken. A fault of the candidate's is a difference.
    """
    if layer in sizes.dense:
        return
    norm_name, router_name = facts.layer(layer, facts.norm.tensor), facts.layer(layer, facts.router.tensor)
    if norm_name not in candidate.tensors or router_name not in candidate.tensors:
        return
    before, after = (checkpoint.tensor(norm_name).to(device) for checkpoint in (source, candidate))
    if before.shape != after.shape or not bool(torch.isfinite(after.float()).all()):
        audit.differences.append(f"{norm_name}: is not finite, or of another shape than the source's")
        return
    smooth = norm_ratio(before, after, facts.norm.offset)
    if bool(((before == 0) != (after == 0)).any()):
        audit.differences.append(f"{norm_name}: zero where the source is not, or the other way round")
    routers = source.tensor(router_name).to(device), candidate.tensor(router_name).to(device)
    _check_router(router_name, norm_name, smooth, *routers, audit)
    experts = {
        expert: [facts.expert(layer, expert, matrix) for matrix in MATRICES] for expert in range(sizes["experts"])
    }
    found, unreadable = _errors(layer, facts, sizes, source, candidate, smooth)
    errors = dict(zip(found, torch.stack(list(found.values())).tolist() if found else [], strict=True))
    for expert, modules in experts.items():
        if expert in unreadable:
            audit.differences.append(unreadable[expert])
            audit.by_expert.append(None)
            continue
        audit.by_expert.append(max((error for error in errors[expert] if math.isfinite(error)), default=None))
        for module, error in zip(modules, errors[expert], strict=True):
            if not error < CLOSE_ENOUGH:
                audit.differences.append(
                    f"{module}.weight_packed: {error:.0%} away from the source's matrix times the norm's ratio; it was "
                    "not scaled as its norm was, or is another matrix"
                )
    audit.weight_error = max((error for error in audit.by_expert if error is not None), default=0.0)


def _errors(
    layer: int, facts: Architecture, sizes: Sizes, source: Checkpoint, candidate: Checkpoint, smooth: torch.Tensor
) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
    """Compare all experts, in units. Where one of the candidate's cannot be read, each is read alone.

    Returns:
        The errors (3,) of each expert on the device of `smooth`, see `matrix_errors`; and what is wrong with each that
        cannot be read.

    Raises:
        CheckpointError: the source is broken.
    """
    device = smooth.device

    def weights(checkpoint: Checkpoint) -> ExpertWeights:
        return ExpertWeights(checkpoint, facts, sizes, layer, device, torch.float32)

    with _broken():
        old = weights(source)
    try:
        new = weights(candidate)
        found = _in_units(old, new, smooth)
        with _broken():
            old.require_finite()
        new.require_finite()
    except BrokenSource:
        raise
    except CheckpointError:
        return _one_by_one(layer, facts, sizes["experts"], source, candidate, smooth)
    return found, {}


class BrokenSource(CheckpointError):
    """The source cannot be read, whatever the candidate is like."""


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except CheckpointError as failure:
        raise BrokenSource(f"the source is broken: {failure}") from None


def _in_units(old: ExpertWeights, new: ExpertWeights, smooth: torch.Tensor) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    unit = unit_of_experts(accelerated(smooth.device), old.hidden, old.width)
    for first, last in units_of(old.experts, unit):
        # The last unit's weights live until these are there, so that a CPU's memory is used again, not returned.
        with _broken():
            source = _matrices(*old.unit(first, last))
        candidate = _matrices(*new.unit(first, last))
        found |= zip(range(first, last), matrix_errors(source, candidate, smooth), strict=True)
    return found


def _matrices(gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (*gate_up.chunk(2, dim=1), down)


def _one_by_one(
    layer: int, facts: Architecture, experts: int, source: Checkpoint, candidate: Checkpoint, smooth: torch.Tensor
) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
    found: dict[int, torch.Tensor] = {}
    unreadable: dict[int, str] = {}
    for expert in range(experts):
        modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
        with _broken():
            old = [read_weight(source, module, smooth.device) for module in modules]
        try:
            new = [read_weight(candidate, module, smooth.device) for module in modules]
        except CheckpointError as failure:
            unreadable[expert] = f"{modules[0].rpartition('.')[0]}: {failure}"
        else:
            found[expert] = matrix_errors(old, new, smooth)
    return found, unreadable


def _check_router(
    router_name: str,
    norm_name: str,
    smooth: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    audit: LayerAudit,
) -> None:
    expected = before.float() * smooth
    ulp = torch.nextafter(expected.abs(), expected.new_full((), torch.inf)) - expected.abs()
    # Rounded once, to the dtype in which it is stored.
    least, most = ((expected + sign * ROUTER_ULPS * ulp).to(after.dtype) for sign in (-1, 1))
    off = ~((least <= after) & (after <= most))
    if not bool(off.any()):
        return
    folded = int((smooth != 1).sum())
    if router_state(before, after, smooth) == "not compensated":
        audit.differences.append(
            f"{router_name}: {NOT_COMPENSATED} {norm_name} was divided in {folded} of {len(smooth)} channels: "
            "the router chooses other experts than the source's; repair it with "
            "`quantize stitch --experts THIS --repair-router`"
        )
    else:
        audit.differences.append(
            f"{router_name}: {int(off.sum())} elements differ from the source's times the norm's ratio by more than "
            f"{ROUTER_ULPS} ulp of float32"
        )
