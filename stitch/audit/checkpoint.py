"""Audits a finished checkpoint against its source, from the files alone.

Every source tensor must be accounted for: kept and renamed ones byte for byte, by hash; quantized ones by
shape, range and closeness; the folded norm by its exact ratio, whose inverse must show up in the router
(closure). Config, index and side files are compared with the source's as well. If report.json has the
digests of what the run wrote, every tensor that changed since is named too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture, Sizes, architecture_for, sizes_of
from quantizers.checkpoint.formats import readable
from quantizers.checkpoint.reader import Checkpoint, block_size, open_folder, read_json
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.forward.smoothing import CLOSE_ENOUGH, matrix_errors, router_state
from quantizers.forward.weights import read_weight
from quantizers.plan.plan import Action, Plan, make_plan
from quantizers.recipe.schema import Experts
from quantizers.recipe.scheme import BITS, GROUPS, Scheme
from quantizers.system.errors import CheckpointError
from quantizers.system.own_files import REPORT, is_plain
from stitch.write.config import output_config
from stitch.write.digests import ShardDigest, changes, recorded_digests

from .folder import config_differences, side_file_differences, strays
from .packed_scheme import scheme_of

ROUTER_ULPS = 2
NOT_COMPENSATED = "not compensated, though"


@dataclass
class Audit:
    """What `verify` found.

    Attributes:
        tensors: source tensors accounted for.
        kept: tensors compared byte for byte.
        differences: one line each, starting with the tensor's name; empty if the audit passes.
        weight_error: per layer, the largest relative error of an expert's matrix after folding.
        digests_checked: whether digests from when the run wrote the shards were available to compare with.
    """

    tensors: int = 0
    kept: int = 0
    differences: list[str] = field(default_factory=list)
    weight_error: list[float] = field(default_factory=list)
    digests_checked: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "tensors": self.tensors,
            "kept_bytes_equal": not any("bytes differ" in line for line in self.differences),
            "kept_tensors": self.kept,
            "differences": self.differences,
            "weight_error": self.weight_error,
            "digests_checked": self.digests_checked,
        }


def verify(
    folder: Path,
    source: Checkpoint,
    device: torch.device,
    digests: Mapping[str, ShardDigest] | None = None,
    step: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Compare a finished checkpoint with its source.

    Args:
        folder: the candidate.
        source: the checkpoint it was made from.
        device: where weights are dequantized for the closeness check.
        digests: of the shards, from when they were written; if None, read from the candidate's report.json.
        step: called after each layer.

    Raises:
        CheckpointError: the folder does not exist, or the source is broken. A fault in the candidate's own
            files is a difference, not an exception.
    """
    audit = Audit()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a finished checkpoint")
    where = str(source.folder / "config.json")
    facts = architecture_for(source.config, where)
    sizes = sizes_of(facts, source.config, where)
    recorded = _recorded(folder) if digests is None else digests
    audit.digests_checked = bool(recorded)
    audit.differences += side_file_differences(folder, source.folder)
    for name, written in recorded.items():  # first, because with a damaged header nothing else can be read
        audit.differences += changes(folder / name, written)
    try:
        candidate = open_folder(folder)
        renamed = readable(candidate, facts)
        schemes = declared_schemes(candidate, facts, sizes["layers"])
        schemes = schemes or [scheme_of(renamed, facts, layer) for layer in range(sizes["layers"])]
    except CheckpointError as failure:
        audit.differences.append(str(failure))
        return _ordered(audit, folder)
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, sizes, specs, Experts(), str(source.folder), block_size(source)).with_schemes(schemes)
    _check_names(plan, candidate, audit)
    config = output_config(source.config, schemes, plan.fp8_block(block_size(source)))
    audit.differences += config_differences(candidate.config, config, ours=bool(recorded))
    audit.differences += strays(folder, {info.file.name for info in candidate.tensors.values()})
    for layer in (*range(sizes["layers"]), None):
        for action in plan.of_layer(layer):
            audit.tensors += 1
            if action.kind in ("keep", "rename"):
                _check_bytes(action, source, candidate, audit)
        if layer is not None:
            _check_layer(layer, facts, sizes, source, renamed, device=device, audit=audit)
            step(f"layer {layer}")
    return _ordered(audit, folder)


def _ordered(audit: Audit, folder: Path) -> Audit:
    """Sort faults that spoil every token to the front, and drop the folder from file names: report.json is published
    with these lines.
    """
    lines = (line.replace(f"{folder}/", "").replace(f"{folder}: ", "") for line in audit.differences)
    audit.differences = sorted(dict.fromkeys(lines), key=lambda line: NOT_COMPENSATED not in line)
    return audit


def declared_schemes(candidate: Checkpoint, facts: Architecture, layers: int) -> list[Scheme] | None:
    """The scheme of each layer's experts, from a candidate's quantization_config.

    If several config groups name integer experts, a layer gets the first that matches its expert 0.

    Returns:
        None if no group names integer experts, or none matches some layer.
    """
    groups = _expert_groups(candidate)
    if len(groups) == 1:
        return [groups[0][1]] * layers
    names = [facts.expert(layer, 0, "gate") for layer in range(layers)]
    matched = [next((s for targets, s in groups if any(_matches(t, name) for t in targets)), None) for name in names]
    schemes = [scheme for scheme in matched if scheme is not None]
    return schemes if len(schemes) == layers else None


def _matches(target: str, name: str) -> bool:
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error:
        return False


def _expert_groups(candidate: Checkpoint) -> list[tuple[list[str], Scheme]]:
    """For each config group of integers that names experts: its expert targets, and its scheme."""
    section = candidate.config.get("quantization_config")
    groups = section.get("config_groups") if isinstance(section, dict) else None
    expert_groups: list[tuple[list[str], Scheme]] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list) or weights.get("type") != "int":
            continue
        expert_targets = [target for target in targets if isinstance(target, str) and "experts" in target]
        bits, group_size = weights.get("num_bits"), weights.get("group_size")
        if expert_targets and bits in BITS and group_size in GROUPS:
            expert_groups.append((expert_targets, Scheme(bits, group_size)))
    return expert_groups


def _recorded(folder: Path) -> Mapping[str, ShardDigest]:
    try:
        report = read_json(folder / REPORT)
    except CheckpointError:
        return {}  # there is no report, or it is damaged, which quantizers/run/record_check.py reports
    return {name: digest for name, digest in recorded_digests(report).items() if is_plain(name)}


def _check_names(plan: Plan, candidate: Checkpoint, audit: Audit) -> None:
    expected: dict[str, Spec] = {}
    for action in plan.actions:
        for name, spec in action.outputs.items():
            # A layer whose norm was not folded keeps its router in the source's dtype.
            allowed_dtypes = {spec.dtype, action.spec.dtype} if action.kind == "compensate" else {spec.dtype}
            expected[name] = spec
            info = candidate.tensors.get(name)
            if info is None:
                audit.differences.append(f"{name}: missing ({action.kind} of {action.source})")
            elif info.dtype not in allowed_dtypes or info.shape != spec.shape:
                audit.differences.append(
                    f"{name}: is {info.dtype} {list(info.shape)}, should be {spec.dtype} {list(spec.shape)}"
                )
    for name in candidate.tensors:
        if name not in expected:
            audit.differences.append(f"{name}: no tensor of the source accounts for it")


def _check_bytes(action: Action, source: Checkpoint, candidate: Checkpoint, audit: Audit) -> None:
    (name,) = action.outputs
    if name not in candidate.tensors:
        return  # already reported as missing
    audit.kept += 1
    if hashlib.sha256(source.raw(action.source)).digest() != hashlib.sha256(candidate.raw(name)).digest():
        audit.differences.append(f"{name}: bytes differ from the source's {action.source}")


def _check_layer(
    layer: int,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    *,
    device: torch.device,
    audit: Audit,
) -> None:
    """Closure: the router must carry the inverse of the norm's change, and every expert must agree with it."""
    norm_name, router_name = facts.layer(layer, facts.fold.norm), facts.layer(layer, facts.fold.router)
    if norm_name not in candidate.tensors or router_name not in candidate.tensors:
        return
    before, after = source.tensor(norm_name).float(), candidate.tensor(norm_name).float()
    if before.shape != after.shape or not bool(torch.isfinite(after).all()):
        audit.differences.append(f"{norm_name}: is not finite, or of another shape than the source's")
        return
    smooth = torch.where(after != 0, before / after, torch.ones_like(before))
    if bool(((before == 0) != (after == 0)).any()):
        audit.differences.append(f"{norm_name}: zero where the source is not, or the other way round")
    _check_router(router_name, norm_name, smooth, source.tensor(router_name), candidate.tensor(router_name), audit)
    worst = 0.0
    for expert in range(sizes["experts"]):
        modules = [facts.expert(layer, expert, matrix) for matrix in ("gate", "up", "down")]
        try:
            old = [read_weight(source, module, device) for module in modules]
        except CheckpointError as failure:
            raise CheckpointError(f"the source is broken: {failure}") from None
        try:
            new = [read_weight(candidate, module, device) for module in modules]
        except CheckpointError as failure:
            audit.differences.append(f"{modules[0].rpartition('.')[0]}: {failure}")
            continue
        for module, error in zip(modules, matrix_errors(old, new, smooth.to(device)), strict=True):
            worst = max(worst, error)
            if not error < CLOSE_ENOUGH:
                audit.differences.append(
                    f"{module}.weight_packed: {error:.0%} away from the source's matrix times the norm's ratio; it was "
                    "not scaled as its norm was, or is another matrix"
                )
    audit.weight_error.append(worst)


def _check_router(
    router_name: str,
    norm_name: str,
    smooth: torch.Tensor,
    before: torch.Tensor,
    after: torch.Tensor,
    audit: Audit,
) -> None:
    expected = before.float() * smooth
    ulp = torch.nextafter(expected.abs(), torch.tensor(torch.inf)) - expected.abs()
    off = ~((after.float() - expected).abs() <= ROUTER_ULPS * ulp)
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
            f"{ROUTER_ULPS} ulp"
        )
