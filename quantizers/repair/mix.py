"""Mixes two checkpoints: everything from an FP8 source, but the experts from one made of its BF16 copy by another tool.

Packed experts, and the norms that their smoothing was folded into, come from the experts-only checkpoint. The published
FrankenQuant was made this way, and has this defect: AWQ divided the norm before the experts by s and multiplied the
experts by s, but the router, which reads the same norm, comes from the source. So before anything is written, each
layer's norms are compared, their ratio is confirmed on some experts, and the router is checked for compensation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own
from quantizers.checkpoint.reader import CONFIG, Checkpoint, torch_dtype
from quantizers.formats.dequantization import read_weight
from quantizers.formats.stored_matrices import architecture_of
from quantizers.formats.tensor_names import published_names, split_fused_experts
from quantizers.formats.unsupported import refuse_swapped_arguments
from quantizers.output import journal
from quantizers.output.journal import ShardDigest
from quantizers.planning.plan import PASSTHROUGH, Plan
from quantizers.solve.folded_scales import close_enough, matrix_errors, norm_ratio, router_state, stored_norm_ratio
from quantizers.stitch.audit.checkpoint import stored_plan, stored_schemes
from quantizers.stitch.write.config_files import write_config_files
from quantizers.stitch.write.shard import copy_shard, kept_hashes, layer_tensors, write_shard
from quantizers.system.errors import CheckpointError
from quantizers.system.files import write_json
from quantizers.system.progress import progress
from quantizers.walk.walk import walk

Router = Literal["not smoothed", "compensated", "not compensated", "unclear"]


@dataclass(frozen=True)
class Layer:
    """Changes that the experts' checkpoint made to one layer."""

    layer: int
    folded: int  # channels of the norm that were divided
    router: Router  # the state of the experts' checkpoint's own
    error: float  # largest relative error of the probed experts against the source's times the ratio of the norms
    error_unscaled: float  # the same against the source's unscaled experts


@dataclass(frozen=True)
class Mix:
    """Two checkpoints that belong together, and how they become one."""

    source: Checkpoint  # the FP8 one, with its experts apart
    experts: Checkpoint  # the experts-only one, under published names
    facts: Architecture
    plan: Plan
    layers: list[Layer]


def belong_together(source: Checkpoint, experts: Checkpoint, device: torch.device, own: Own = None) -> Mix:
    """Find out whether and how two checkpoints can be mixed; nothing is written.

    Args:
        experts: an experts-only checkpoint made from a BF16 copy of `source`, by any tool.
        own: a file with the user's own facts about the family.

    Raises:
        CheckpointError: the two do not belong together, are swapped, or their format cannot be stitched.
    """
    refuse_swapped_arguments(source, experts, f"--source {experts.name} --experts {source.name}")
    facts = architecture_of(source, own)
    source = split_fused_experts(source, facts)
    if not facts.is_of(experts.config):
        where = experts.folder / CONFIG
        raise CheckpointError(where, f"is another model than {source.name}", "give one made from a copy of it")
    experts = published_names(experts, facts)
    schemes = stored_schemes(experts, facts)
    layers = [examine(layer, source, experts, facts, device, schemes[layer].bits) for layer in facts.moe_layers]
    unfolded = [layer.layer for layer in layers if not layer.folded]
    plan = stored_plan(source, facts, schemes).with_norms_kept(unfolded)
    return Mix(source, experts, facts, plan, layers)


def examine(
    layer: int,
    source: Checkpoint,
    experts: Checkpoint,
    facts: Architecture,
    device: torch.device,
    bits: int,
) -> Layer:
    """Compare a layer's norms, and confirm their ratio on some of its experts.

    Raises:
        CheckpointError: the experts differ too much from the source's times the ratio of the norms, or the norm was
            smoothed although something reads it that keeps its bytes.
    """
    ratio, norm = torch.ones(1), facts.norm
    state: Router = "not smoothed"
    if norm is not None:
        ratio = stored_norm_ratio(source, experts, facts.layer(layer, norm.tensor), norm.offset)
    folded = int((ratio != 1).sum())
    if norm is not None and folded:
        if facts.also_reads_the_norm:
            raise CheckpointError(
                f"{experts.folder}: layer {layer}",
                f"{norm.tensor} was divided in {folded} of {len(ratio)} channels, but "
                f"{' and '.join(facts.also_reads_the_norm)} read it too and would keep the source's bytes: its "
                "experts fit the divided norm alone, so neither norm would be right for both",
                "give experts that were quantized without scales in this norm",
            )
        state = "compensated"  # as it is, if it does not read this norm
        if facts.router_follows:
            router = facts.layer(layer, facts.router.tensor)
            own_router = experts.tensor(experts.require(router, "the router").name)
            state = router_state(source.tensor(router), own_router, ratio)
    inner = facts.of_layer(layer).inner
    error = 0.0
    unscaled = 0.0
    smooth = ratio.to(device)
    for expert in sorted({0, facts.num_experts // 2, facts.num_experts - 1}):  # the audit reads all of them
        modules = [facts.expert(layer, expert, matrix) for matrix in facts.matrices]
        old, new = ([read_weight(c, module, device) for module in modules] for c in (source, experts))
        error = max(error, *matrix_errors(old, new, smooth, inner=inner).tolist())
        unscaled = max(unscaled, *matrix_errors(old, new, torch.ones_like(smooth), inner=inner).tolist())
    if error >= close_enough(bits):
        raise CheckpointError(
            f"{experts.folder}: layer {layer}",
            f"its experts are {error:.0%} away from the source's times the ratio of the norms",
            "they were made from another model, or smoothed in another way",
        )
    return Layer(layer, folded, state, error, unscaled)


def describe(layers: list[Layer]) -> list[str]:
    """Notes for the user about the layers of a mix, one line each."""
    smoothed = [layer for layer in layers if layer.folded]
    if not smoothed:
        return ["no norm was smoothed: the source's routers fit"]
    lines = [
        f"norms smoothed in {len(smoothed)} of {len(layers)} layers; confirmed on their experts: "
        f"{max(layer.error for layer in smoothed):.1%} off at most with the ratio of the norms, "
        f"{min(layer.error_unscaled for layer in smoothed):.0%} and more without"
    ]
    affected = [layer.layer for layer in smoothed if layer.router == "not compensated"]
    if affected:
        lines.append(
            f"router not compensated in {len(affected)} layers of the experts' checkpoint "
            f"({', '.join(map(str, affected[:8]))}{', …' if len(affected) > 8 else ''}): it chose other experts than "
            "the source while it was made"
        )
    return lines


def mixed_tensors(mix: Mix, layer: int, source: Checkpoint, *, repair_router: bool) -> dict[str, torch.Tensor]:
    """One layer's shard: packed experts and folded norm from the experts' checkpoint, the rest from `source`.

    With `repair_router` the router is router * norm / norm', else the source's; both in the dtype that servers hold.

    Raises:
        CheckpointError: a tensor of the experts' checkpoint is missing or has another shape than planned.
    """
    facts = mix.facts
    experts = mix.experts
    tensors: dict[str, torch.Tensor] = {}
    for action in sorted(mix.plan.of_layer(layer), key=lambda action: action.kind == "compensate"):  # after the norm
        name = action.source
        if action.kind in PASSTHROUGH:
            (own,) = action.outputs
            tensors[own] = source.tensor(name)
        elif action.kind == "fold":
            # Stored in the source's dtype: bfloat16 for a norm that comes from a BF16 copy.
            norm = experts.tensor(experts.require(name, "the smoothed norm").name)
            tensors[name] = norm.to(source.tensor(name).dtype)
        elif action.kind == "compensate":
            router = source.tensor(name).float()
            if repair_router and facts.norm:
                norm_name = facts.layer(layer, facts.norm.tensor)
                router = router * norm_ratio(source.tensor(norm_name), tensors[norm_name], facts.norm.offset)
            tensors[name] = router.to(torch_dtype(action.outputs[name].dtype))
        elif action.kind == "quantize":
            for output, spec in action.outputs.items():
                tensor = experts.tensor(experts.require(output, "a part of a packed expert").name)
                if tensor.shape != spec.shape:
                    shapes = f"{list(tensor.shape)}, not {list(spec.shape)}"
                    raise CheckpointError(experts.folder, f"{output} has shape {shapes}")
                tensors[output] = tensor.to(torch_dtype(spec.dtype)) if output.endswith("weight_scale") else tensor
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def write_mix(mix: Mix, work: Path, *, repair_router: bool, check: Callable[[], None]) -> dict[str, ShardDigest]:
    """Write the checkpoint into `work`/output, and return the digests of the shards, by file name.

    Finished and undamaged layers of an earlier call are not written again. `repair_router` is as in `mixed_tensors`;
    `check` is called between steps, and may raise to interrupt.
    """
    layers = mix.facts.num_layers
    plan = mix.plan
    folder = work / "output"
    for layer in journal.damaged_shards(work, journal.done_shards(work, layers)):
        journal.layer_file(work, layer).unlink()  # so that it is stitched again
    journal.remove_cut_files(work)
    (work / "layers").mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    left = [layer for layer in range(layers) if not journal.layer_file(work, layer).exists()]
    tensors = {layer: [action.source for action in plan.of_layer(layer) if action.kind != "quantize"] for layer in left}
    with (
        progress("stitching", layers, layers - len(left)) as shown,
        walk(mix.source, tensors, check=check) as steps,
    ):
        for step in steps:
            number, shard = step.number, plan.shard_file(step.number)
            made = mixed_tensors(mix, number, step.source, repair_router=repair_router)
            digest = write_shard(made, folder / shard, kept_hashes(plan, number, step.source), plan.unread(number))
            write_json(journal.layer_file(work, number), {"layer": number, "shard": shard, "digest": digest.as_dict()})
            shown(f"layer {number}")
    written = dict(journal.done_shards(work, layers))
    for passing in plan.passthrough_parts:
        shard = plan.shard_file(passing)
        if passing is not None and passing in plan.tables:
            written[shard] = copy_shard(plan, passing, mix.source, folder / shard)
            continue
        parts = layer_tensors(plan, passing, mix.source, None).host
        written[shard] = write_shard(parts, folder / shard, carried=plan.unread(passing))
    check()
    write_config_files(folder, mix.source, plan, mix.facts)
    return written
