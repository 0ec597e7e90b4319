"""Audits a finished checkpoint against its source, from the files alone.

Every source tensor must be accounted for: kept and renamed ones byte for byte, by hash; quantized ones by
shape, range and closeness; the folded norm by its exact ratio, whose inverse must show up in the router
(closure). Config, index and side files are compared with the source's as well. If report.json has the
digests of what the run wrote, every tensor that changed since is named too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.formats import readable
from quantizers.checkpoint.fused_experts import with_experts_apart
from quantizers.checkpoint.integer_words_config import has_words
from quantizers.checkpoint.reader import Checkpoint, block_size, open_folder, read_json
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.plan.assign_actions import make_plan
from quantizers.plan.plan import Plan
from quantizers.recipe.schema import BITS, GROUPS, Experts, Scheme
from quantizers.system.errors import CheckpointError
from quantizers.system.output_files import REPORT, is_plain
from quantizers.system.thread_map import thread_map
from stitch.write.config import output_config
from stitch.write.digests import ShardDigest, changes, recorded_digests

from .folder import config_differences, side_file_differences, strays
from .layer import NOT_COMPENSATED, LayerAudit, audit_kept, audit_layer, missing_layer
from .packed_scheme import stored_schemes
from .words import SECTION_FILES, Account, audit_words_layer, comparable


@dataclass
class Audit:
    """What `verify` found.

    Attributes:
        tensors: source tensors accounted for.
        kept: tensors compared byte for byte.
        differences: one line each, starting with the tensor's name; empty if the audit passes.
        changed: those of them that changed since the shards were written.
        weight_error: per layer, the largest relative error of an expert's matrix after folding.
        digests_checked: whether digests from when the run wrote the shards were available to compare with.
        account: of a checkpoint for which there is no plan: what became of the source's tensors, one line each.
    """

    tensors: int = 0
    kept: int = 0
    differences: list[str] = field(default_factory=list)
    weight_error: list[float] = field(default_factory=list)
    digests_checked: bool = False
    changed: list[str] = field(default_factory=list)
    account: list[str] = field(default_factory=list)

    def add(self, found: LayerAudit) -> None:
        """Add what was found in a layer, or outside the layers."""
        self.tensors += found.tensors
        self.kept += found.kept
        self.differences += found.differences
        if found.weight_error is not None:
            self.weight_error.append(found.weight_error)

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "tensors": self.tensors,
            "kept_bytes_equal": not any("bytes differ" in line for line in self.differences),
            "kept_tensors": self.kept,
            "differences": self.differences,
            "weight_error": self.weight_error,
            "digests_checked": self.digests_checked,
        } | ({"account": self.account} if self.account else {})


def verify(
    folder: Path,
    source: Checkpoint,
    device: torch.device,
    digests: Mapping[str, ShardDigest] | None = None,
    step: Callable[[str], None] = lambda _: None,
    audited: Sequence[LayerAudit] | None = None,
    *,
    own: Path | None = None,
) -> Audit:
    """Compare a finished checkpoint with its source.

    Args:
        folder: the candidate.
        source: the checkpoint it was made from.
        device: where weights are dequantized for the closeness check.
        digests: of the shards, from when they were written; if None, read from the candidate's report.json.
        step: called after each layer.
        audited: what a run found when it wrote the shards, in their order. The files are then compared with
            `digests` alone, past the system's cache of them, and no tensor is read a second time.
        own: a file with the user's own facts about the family.

    Raises:
        CheckpointError: the folder does not exist, or the source is broken. A fault in the candidate's own
            files is a difference, not an exception.
    """
    audit = Audit()
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a finished checkpoint")
    where = str(source.folder / "config.json")
    facts = architecture_for(source.config, where, own)
    sizes = sizes_of(facts, source.config, where)
    source = with_experts_apart(source, facts, sizes)
    recorded = _recorded(folder) if digests is None else digests
    audit.digests_checked = bool(recorded)
    audit.differences += side_file_differences(folder, source.folder)

    def changed(name: str) -> list[str]:
        return changes(folder / name, recorded[name], past_the_cache=audited is not None)

    with closing(thread_map(changed, recorded)) as found:  # first, as with a damaged header nothing else can be read
        for name, lines in zip(recorded, found, strict=True):
            audit.changed += lines
            if audited is not None:
                step(name)
    audit.differences += audit.changed
    try:
        candidate = open_folder(folder)
        renamed = readable(candidate, facts)
        if has_words(candidate.config):
            _audit_words(audit, facts, sizes, source, renamed, device, step)
            return _ordered(audit, folder)
        schemes = declared_schemes(candidate, facts, sizes) or stored_schemes(renamed, facts, sizes)
    except CheckpointError as failure:
        audit.differences.append(str(failure))
        return _ordered(audit, folder)
    plan = _plan(source, renamed, facts, sizes, schemes)
    _check_names(plan, facts, candidate, audit)
    config = output_config(source.config, facts, plan, plan.fp8_form(block_size(source)))
    audit.differences += config_differences(candidate.config, config, ours=bool(recorded))
    audit.differences += strays(folder, {info.file.name for info in candidate.tensors.values()})
    for position, layer in enumerate(plan.parts):
        if audited is not None:
            audit.add(audited[position])
            continue
        of_layer = LayerAudit()
        audit_kept(plan.of_layer(layer), source, candidate, of_layer)
        if layer is not None and layer not in plan.mtp:
            audit_layer(layer, facts, sizes, source, renamed, device=device, audit=of_layer)
            step(f"layer {layer}")
        audit.add(of_layer)
    return _ordered(audit, folder)


def _plan(
    source: Checkpoint, candidate: Checkpoint, facts: Architecture, sizes: Sizes, schemes: Sequence[Scheme]
) -> Plan:
    """The plan by which a candidate was made, whatever its settings were.

    Where the family allows it, a norm may have been folded. A layer's norm that has the source's bytes was not, and its
    router must have them too, unless it was written in another dtype, as a compensated one is: then it is compared as
    such, for a scale of 1.
    """
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, sizes, specs, Experts(), str(source.folder), block_size(source)).with_schemes(schemes)
    kept = []
    for layer in sizes.moe_layers if plan.folds else ():
        norm, router = facts.layer(layer, facts.norm.tensor), facts.layer(layer, facts.router.tensor)
        written = candidate.tensors.get(router)
        same_dtype = written is None or written.dtype == source.tensors[router].dtype
        if same_dtype and norm in candidate.tensors and source.sha256(norm) == candidate.sha256(norm):
            kept.append(layer)
    return plan.with_norms_kept(kept)


def _audit_words(
    audit: Audit,
    facts: Architecture,
    sizes: Sizes,
    source: Checkpoint,
    candidate: Checkpoint,
    device: torch.device,
    step: Callable[[str], None],
) -> None:
    """Audit a checkpoint of AutoAWQ, GPTQ or AutoRound, for which there is no plan, see words.py."""
    account = Account()
    audit.differences = [line for line in audit.differences if line.partition(":")[0] not in SECTION_FILES]
    audit.differences += config_differences(comparable(candidate.config), comparable(source.config), ours=False)
    audit.differences += strays(candidate.folder, {info.file.name for info in candidate.tensors.values()})
    for layer in (*range(sizes["layers"]), *sizes.mtp, None):
        found = audit_words_layer(layer, facts, sizes, source, candidate, device=device, account=account)
        audit.add(found)
        if layer is not None:
            step(f"layer {layer}")
    unknown = [name for name in candidate.tensors if name not in account.read and not facts.is_unread(name)]
    audit.differences += [f"{name}: no tensor of the source accounts for it" for name in unknown]
    audit.account = account.lines()


def _ordered(audit: Audit, folder: Path) -> Audit:
    """Sort faults that spoil every token to the front, and drop the folder from file names: report.json is published
    with these lines.
    """
    lines = (line.replace(f"{folder}/", "").replace(f"{folder}: ", "") for line in audit.differences)
    audit.differences = sorted(dict.fromkeys(lines), key=lambda line: NOT_COMPENSATED not in line)
    return audit


def declared_schemes(candidate: Checkpoint, facts: Architecture, sizes: Sizes) -> list[Scheme] | None:
    """The scheme of each layer's experts, from a candidate's quantization_config.

    If several config groups name integer experts, a layer gets the first that matches its expert 0; a layer without
    experts gets what the first layer with experts has.

    Returns:
        None if no group names integer experts, or none matches some layer.
    """
    groups = _expert_groups(candidate)
    if len(groups) == 1:
        return [groups[0][1]] * sizes["layers"]
    first = sizes.moe_layers[0]
    asked = [first if layer in sizes.dense else layer for layer in range(sizes["layers"])]
    names = [facts.expert(layer, 0, "gate") for layer in asked]
    matched = [next((s for targets, s in groups if any(_matches(t, name) for t in targets)), None) for name in names]
    schemes = [scheme for scheme in matched if scheme is not None]
    return schemes if len(schemes) == sizes["layers"] else None


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
        return {}  # there is no report, or it is damaged, which quantizers/run/manifest_check.py reports
    return {name: digest for name, digest in recorded_digests(report).items() if is_plain(name)}


def _check_names(plan: Plan, facts: Architecture, candidate: Checkpoint, audit: Audit) -> None:
    expected: dict[str, Spec] = {}
    absent = set()
    for layer in plan.mtp:
        names = plan.shard(layer)
        if not names.keys() & candidate.tensors.keys():
            absent.add(layer)
            audit.differences.append(missing_layer(facts, layer, len(names)))
    for action in plan.actions:
        if action.layer in absent:
            continue
        for name, spec in action.outputs.items():
            expected[name] = spec
            info = candidate.tensors.get(name)
            if info is None:
                audit.differences.append(f"{name}: missing ({action.kind} of {action.source})")
            elif info.dtype != spec.dtype or info.shape != spec.shape:
                audit.differences.append(
                    f"{name}: is {info.dtype} {list(info.shape)}, should be {spec.dtype} {list(spec.shape)}"
                )
    for name in candidate.tensors:
        if name not in expected:
            audit.differences.append(f"{name}: no tensor of the source accounts for it")
