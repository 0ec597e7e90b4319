"""Audit of a finished checkpoint against its source, from the files alone.

Every source tensor must be accounted for: passthrough and renamed ones by hash; converted modules by the formula,
applied again; quantized ones by shape, range and closeness; the folded norm by its exact ratio, whose inverse must
appear in the router (closure). Config, index and side files are compared too, and shards with report.json's digests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own
from quantizers.checkpoint.loaded_tensors import prefetched_tensors
from quantizers.checkpoint.reader import CONFIG, WEIGHTS, Checkpoint, open_folder, side_files
from quantizers.checkpoint.remote import HubFiles
from quantizers.checkpoint.safetensors_header import FLOATING, Spec
from quantizers.formats.format import PACKED, SCALE, ExpertFormat, format_of_experts
from quantizers.formats.fp8 import ROWS, block_size, has_kv_scales
from quantizers.formats.lossless import TARGETS
from quantizers.formats.stored_matrices import architecture_of, quantized_matrices
from quantizers.formats.tensor_names import published_names, split_fused_experts
from quantizers.output.journal import MISSING, ShardDigest, differences, short_value
from quantizers.output.manifest import read_record
from quantizers.planning.assign_actions import make_plan
from quantizers.planning.plan import KV_SCALE, KV_SCALES, Plan
from quantizers.recipe.schema import Attention, Experts
from quantizers.stitch.write.config_files import output_config
from quantizers.stitch.write.shard import changes, recorded_digests
from quantizers.system.errors import CheckpointError, RecipeError
from quantizers.system.files import file_sha256
from quantizers.system.thread_map import thread_map

from .layer import NOT_COMPENSATED, LayerAudit, audit_kept, audit_layer, global_scales

# Endings and names of other files that a loader reads or runs.
LOADED = (".py", ".json", ".jinja", ".model", ".tiktoken")
LOADED_NAMES = ("vocab.txt", "merges.txt")


@dataclass
class Audit:
    """The result of `verify`; it passes without differences."""

    tensors: int = 0  # of the source, accounted for
    kept: int = 0  # compared byte for byte
    converted: int = 0  # compared with what the formula makes of the source's
    values: int = 0  # in those, where experts are converted and each value was compared
    differences: list[str] = field(default_factory=list)  # one line each, starting with the tensor's name
    weight_error: list[float] = field(default_factory=list)  # per layer, see `LayerAudit`
    digests_checked: bool = False  # whether there were digests from when the shards were written
    changed: list[str] = field(default_factory=list)  # the differences from those digests

    def add(self, layer: LayerAudit) -> None:
        """Add the audit of a layer, or of the tensors outside the layers."""
        self.tensors += layer.tensors
        self.kept += layer.kept
        self.converted += layer.converted
        self.values += layer.values
        self.differences += layer.differences
        if layer.weight_error is not None:
            self.weight_error.append(layer.weight_error)

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "tensors": self.tensors,
            "kept_bytes_equal": not any("bytes differ" in line for line in self.differences),
            "kept_tensors": self.kept,
            "differences": self.differences,
            "weight_error": self.weight_error,
            "digests_checked": self.digests_checked,
            **({"converted_matrices": self.converted} if self.converted else {}),
            **({"values": self.values} if self.values else {}),
        }


def verify(
    folder: Path,
    source: Checkpoint,
    device: torch.device,
    digests: Mapping[str, ShardDigest] | None = None,
    step: Callable[[str], None] = lambda _: None,
    audited: Sequence[LayerAudit] | None = None,
    *,
    own: Own = None,
    remote: HubFiles | None = None,
    convert: str | None = None,
) -> Audit:
    """Compare a finished checkpoint in a folder with its source.

    Args:
        device: where weights are dequantized for the closeness check.
        digests: of the shards, from when they were written; None to read them from the candidate's report.json.
        step: called after each layer.
        audited: the audits that a run made when it wrote the shards, in their order. The files are then compared with
            `digests` only, bypassing the system's file cache, and no tensor is read a second time.
        own: the architecture, or a file of the user's with it; None for a kept or a derived one.
        remote: has shards that are not in the folder: their hashes there are compared.
        convert: what its experts were converted to; None to read that from its report.json, if they were.

    Raises:
        CheckpointError: the source is damaged. Damage to the candidate is a difference.
    """
    audit = Audit()
    facts = architecture_of(source, own)
    source = split_fused_experts(source, facts)
    record = read_record(folder)
    recorded = recorded_digests(record) if digests is None else digests
    convert = convert or _recorded_conversion(record)
    audit.digests_checked = bool(recorded)
    audit.differences += _side_file_differences(folder, source.folder)

    def changed(name: str) -> list[str]:
        if remote and not (folder / name).is_file():
            same = name in remote.files and remote.files[name].sha256 == recorded[name].sha256
            return [] if same else [f"{name}: on the Hub it is not as the run wrote it"]
        return changes(folder / name, recorded[name], past_the_cache=audited is not None)

    with closing(thread_map(changed, recorded)) as changed_lines:  # first: behind a damaged header nothing can be read
        for name, lines in zip(recorded, changed_lines, strict=True):
            audit.changed += lines
            if audited is not None:
                step(name)
    audit.differences += audit.changed
    try:
        candidate = open_folder(folder, strays=True, remote=remote)
        renamed = published_names(candidate, facts)
        schemes = stored_schemes(renamed, facts) if convert is None else []
    except CheckpointError as failure:
        audit.differences.append(str(failure))
        return _ordered(audit, folder)
    try:
        attention = stored_attention(source, candidate, facts)
        kv_cache = has_kv_scales(candidate.config) or any(name.endswith(KV_SCALES) for name in candidate.tensors)
        plan = stored_plan(source, facts, schemes, attention, kv_cache=kv_cache, convert=convert)
    except RecipeError as failure:  # made so that it cannot be served
        audit.differences.append(str(failure))
        return _ordered(audit, folder)
    plan = plan.with_norms_kept(list(_unfolded(plan, source, renamed, facts)))
    audit.differences += _header_differences(plan, facts, candidate)
    config = output_config(source.config, facts, plan)
    audit.differences += _config_differences(candidate.config, config, ours=audit.digests_checked)
    audit.differences += strays(folder, {info.file.name for info in candidate.tensors.values()})
    if audited is not None:
        for of_layer in audited:
            audit.add(of_layer)
        return _ordered(audit, folder)
    sources: Iterable[Checkpoint] = repeat(source, len(plan.parts))
    if source.remote is not None:  # each part in memory, but for tables
        names = {part: [action.source for action in plan.of_layer(part)] for part in plan.parts}
        loaded = prefetched_tensors(source, [[] if part in plan.tables else names[part] for part in plan.parts])
        sources = (source if part in plan.tables else stored for part, stored in zip(plan.parts, loaded, strict=True))
    for layer, layer_source in zip(plan.parts, sources, strict=True):
        of_layer = audit_kept(plan, layer, layer_source, candidate, device)
        for name in plan.kv_scales(layer):
            values = candidate.tensor(name).float().flatten().tolist() if name in candidate.tensors else []
            if not all(0 < value < math.inf for value in values):
                of_layer.differences.append(f"{name}: is {values}, and a positive number is needed")
        if layer is not None and layer < plan.layers:
            if convert is None:
                bits = schemes[layer].bits
                audit_layer(layer, facts, layer_source, renamed, bits=bits, device=device, audit=of_layer)
            elif layer in facts.moe_layers:
                of_layer.differences += global_scales(layer, facts, candidate)
            step(f"layer {layer}")
        audit.add(of_layer)
    return _ordered(audit, folder)


def stored_plan(
    source: Checkpoint,
    facts: Architecture,
    schemes: Sequence[ExpertFormat],
    attention: Attention = "keep",
    *,
    kv_cache: bool = False,
    convert: str | None = None,
) -> Plan:
    """The plan for a source, each layer's scheme, the conversion of other linear modules, and scales of a cache.

    It has the settings of the recipe that folds all it can, or of the one that converts; then there are no schemes.
    """
    experts = Experts.model_validate({"convert": convert} if convert is not None else {"format": schemes[0].name})
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    where, block = str(source.folder), block_size(source)
    matrices = quantized_matrices(source.tensors, source.config, where)
    plan = make_plan(facts, specs, experts, where, block, attention, kv_cache=kv_cache, matrices=matrices)
    return plan if convert is not None else plan.with_schemes(schemes)


def _recorded_conversion(record: Mapping[str, Any]) -> str | None:
    """Return what a report says that the experts were converted to; None if they were quantized, or it is damaged."""
    conversion = record.get("conversion")
    to = conversion.get("to") if isinstance(conversion, Mapping) else None
    return to if isinstance(to, str) and to in TARGETS else None


def stored_attention(source: Checkpoint, candidate: Checkpoint, facts: Architecture) -> Attention:
    """Conversion of linear modules other than experts, from the first one that is quantized in one of both alone."""
    for layer in range(facts.num_layers):
        for module in (facts.layer(layer, name) for name in facts.of_layer(layer).linears):
            before, now = (_is_plain(checkpoint, module) for checkpoint in (source, candidate))
            if before is None or now is None or before == now:
                continue
            if now:
                return "bf16"
            weight, scale = (candidate.tensors.get(f"{module}.{last}") for last in ("weight", SCALE))
            return "fp8" if weight and (not scale or scale.shape == ROWS.scale_shape(weight.shape)) else "fp8-block"
    return "keep"


def _is_plain(checkpoint: Checkpoint, module: str) -> bool | None:
    """Whether a module's weight is stored as plain numbers; None if there is none."""
    if f"{module}.{PACKED}" in checkpoint.tensors:
        return False
    weight = checkpoint.tensors.get(f"{module}.weight")
    return None if weight is None else weight.dtype in FLOATING


def _unfolded(plan: Plan, source: Checkpoint, candidate: Checkpoint, facts: Architecture) -> Iterator[int]:
    """The layers whose norms a candidate did not fold, though its family allows it: those with the source's bytes.

    The router must then have the source's bytes too, unless it was written in another dtype, as a compensated one is:
    then it is compared as one, with a scale of 1.
    """
    if facts.norm is None or not plan.folds:
        return
    for layer in facts.moe_layers:
        norm, router = facts.layer(layer, facts.norm.tensor), facts.layer(layer, facts.router.tensor)
        written = candidate.tensors.get(router)
        same_dtype = written is None or written.dtype == source.tensors[router].dtype
        if same_dtype and norm in candidate.tensors and source.sha256(norm) == candidate.sha256(norm):
            yield layer


def _ordered(audit: Audit, folder: Path) -> Audit:
    """Sort defects that spoil every token to the front, and strip the folder, as report.json is published."""
    lines = (line.replace(f"{folder}/", "").replace(f"{folder}: ", "") for line in audit.differences)
    audit.differences = sorted(dict.fromkeys(lines), key=lambda line: NOT_COMPENSATED not in line)
    return audit


def _header_differences(plan: Plan, facts: Architecture, candidate: Checkpoint) -> list[str]:
    """Missing and unexpected tensors, and those of another dtype or shape than planned."""
    # Most tools leave these layers out, since transformers does not build them.
    absent = [layer for layer in plan.mtp if not plan.shard(layer).keys() & candidate.tensors.keys()]
    lines = [
        f"{facts.layer(layer, '').rstrip('.')}: all {len(plan.shard(layer))} tensors of this MTP layer are missing; "
        "speculative decoding needs it"
        for layer in absent
    ]
    unknown = dict.fromkeys(candidate.tensors)
    planned = [
        (name, spec, f"{action.kind} of {action.source}")
        for action in plan.actions
        if action.layer not in absent
        for name, spec in action.outputs.items()
    ]
    scales = (name for layer in plan.cached for name in plan.kv_scales(layer))
    planned += [(name, KV_SCALE, "servers then take 1 without a word") for name in scales]
    for name, spec, why in planned:
        unknown.pop(name, None)
        info = candidate.tensors.get(name)
        if info is None:
            lines.append(f"{name}: missing ({why})")
        elif info.dtype != spec.dtype or info.shape != spec.shape:
            lines.append(f"{name}: is {info.dtype} {list(info.shape)}, should be {spec.dtype} {list(spec.shape)}")
    return lines + [f"{name}: no tensor of the source accounts for it" for name in unknown]


# Config and side files ----------------------------------------------------------------------------------------------


def _config_differences(actual: Mapping[str, Any], expected: Mapping[str, Any], ours: bool) -> Iterator[str]:
    """Keys of config.json with another value than this program would write, one line each.

    Other tools may write an equivalent quantization_config differently: servers' rules check one that is not `ours`.
    """
    for place, before, now in differences(expected, actual, missing=MISSING):
        if ours or place.partition(".")[0] != "quantization_config":
            is_now, should_be = ("missing" if value is MISSING else short_value(value, 80) for value in (now, before))
            yield f"{CONFIG}: {place} is {is_now}, should be {should_be}"


def _side_file_differences(folder: Path, source: Path) -> Iterator[str]:
    """Side files that are missing, differ from the source's, or are not in the source."""
    names = [str(file.relative_to(source)) for file in side_files(source)]
    for name in names:
        try:
            if file_sha256(folder / name) != file_sha256(source / name):
                yield f"{name}: differs from the source's"
        except FileNotFoundError:
            yield f"{name}: missing; the source has it"
        except OSError as failure:
            yield f"{name}: cannot be read ({failure.strerror})"
    yield from (f"{name}: not in the source, but loaders read it; remove it" for name in added(folder, names))


def added(folder: Path, known: Collection[str]) -> list[str]:
    """Names of unknown side files that a loader reads or runs."""
    files = (file for file in side_files(folder) if file.suffix in LOADED or file.name in LOADED_NAMES)
    return [name for file in files if (name := str(file.relative_to(folder))) not in known]


def strays(folder: Path, shards: Collection[str]) -> list[str]:
    """Weight files that are not in the index, whose shards these are: some loaders read or prefer them."""
    return [
        f"{path.name}: weights file not in the index; some loaders load it anyway"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in WEIGHTS and path.name not in shards
    ]


# The experts' scheme -----------------------------------------------------------------------------------------------


def stored_schemes(experts: Checkpoint, facts: Architecture) -> list[ExpertFormat]:
    """Each layer's scheme, from the shapes of its first whole expert's tensors (under published names).

    Raises a CheckpointError if they are in no format that experts can be quantized to.
    """
    schemes = {
        layer: format_of_experts(experts, [facts.expert(layer, number, "down") for number in range(facts.num_experts)])
        for layer in facts.moe_layers
    }
    return [schemes.get(layer, schemes[facts.moe_layers[0]]) for layer in range(facts.num_layers)]
