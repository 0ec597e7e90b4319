"""Mixes two checkpoints: everything from an FP8 source, but the experts from one made of its BF16 copy by another tool.

Packed experts, and the norms that their smoothing was folded into, come from the experts-only checkpoint;
everything else keeps the source's bytes. The published FrankenQuant was made this way, and has this defect:
AWQ divided the norm before the experts by s and multiplied the experts by s, but the router, which reads the
same norm, comes from the source and was not multiplied. So before anything is written, each layer's norms are
compared, their ratio is confirmed on some experts, and the router is checked for compensation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes, is_of, sizes_of
from quantizers.checkpoint.reader import CONFIG, Checkpoint, torch_dtype
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.dequantization import read_weight
from quantizers.formats.fp8 import block_size
from quantizers.formats.tensor_names import published_names, split_fused_experts
from quantizers.formats.unsupported import refuse_swapped_arguments
from quantizers.layers.loop import layer_steps
from quantizers.layers.step import Consumer, LayerStep, Need
from quantizers.output import journal
from quantizers.planning.assign_actions import make_plan
from quantizers.planning.plan import PASSTHROUGH, Plan
from quantizers.recipe.schema import Experts
from quantizers.solve.folded_scales import CLOSE_ENOUGH, matrix_errors, norm_ratio, router_state, stored_norm_ratio
from quantizers.system.errors import CheckpointError
from quantizers.system.files import write_json
from quantizers.system.progress import progress
from stitch.audit.checkpoint import stored_schemes
from stitch.write import shard as writing
from stitch.write.config_files import write_config_files
from stitch.write.digests import ShardDigest
from stitch.write.shard import kept_hashes, write_shard

Router = Literal["not smoothed", "compensated", "not compensated", "unclear"]


@dataclass(frozen=True)
class Layer:
    """What the experts' checkpoint did to one layer.

    Attributes:
        layer: its number.
        folded: channels of the norm that were divided.
        router: the state of the experts' checkpoint's own router.
        error: largest relative error of the probed experts against the source's times the ratio of the norms.
        error_unscaled: the same against the source's unscaled experts.
    """

    layer: int
    folded: int
    router: Router
    error: float
    error_unscaled: float


@dataclass(frozen=True)
class Mix:
    """Two checkpoints that belong together, and how they become one.

    Attributes:
        source: the FP8 checkpoint, with its experts apart.
        experts: the experts-only checkpoint, under published names.
        facts, sizes: of the source's family.
        plan: what becomes of each of the source's tensors.
        found: what the experts' checkpoint did to each layer.
    """

    source: Checkpoint
    experts: Checkpoint
    facts: Architecture
    sizes: Sizes
    plan: Plan
    found: list[Layer]


def belong_together(source: Checkpoint, experts: Checkpoint, device: torch.device, own: Own = None) -> Mix:
    """Find out whether and how two checkpoints can be mixed; nothing is written.

    Args:
        source: the FP8 checkpoint.
        experts: an experts-only checkpoint made from a BF16 copy of it, by any tool.
        own: a file with the user's own facts about the family.

    Raises:
        CheckpointError: the two do not belong together, are swapped, or their format cannot be stitched.
    """
    refuse_swapped_arguments(source, experts, f"--source {experts.name} --experts {source.name}")
    where = str(source.folder / CONFIG)
    facts = architecture_for(source.config, where, own, source.tensors)
    sizes = sizes_of(facts)
    source = split_fused_experts(source, facts, sizes)
    config_path = str(experts.folder / CONFIG)
    if not is_of(facts, experts.config):
        raise CheckpointError(f"{config_path}: is another model than {source.name}; give one made from a copy of it")
    renamed = published_names(experts, facts)
    schemes = stored_schemes(renamed, facts, sizes)
    found = examine(source, renamed, facts, sizes, device)
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, sizes, specs, Experts(), str(source.folder), block_size(source))
    plan = plan.with_schemes(schemes).with_norms_kept([layer.layer for layer in found if not layer.folded])
    return Mix(source, renamed, facts, sizes, plan, found)


def examine(
    source: Checkpoint, experts: Checkpoint, facts: Architecture, sizes: Sizes, device: torch.device
) -> list[Layer]:
    """Compare every layer's norms, and confirm the ratio on some of its experts.

    Args:
        experts: the experts-only checkpoint, under published names.

    Raises:
        CheckpointError: a layer's experts differ too much from the source's times the ratio of the norms, or its norm
            was smoothed although something reads it that keeps its bytes.
    """
    layers, norm = [], facts.norm
    for layer in sizes.moe_layers:
        ratio = torch.ones(1)
        if norm is not None:
            ratio = stored_norm_ratio(source, experts, facts.layer(layer, norm.tensor), norm.offset)
        router = facts.layer(layer, facts.router.tensor)
        state: Router = "not smoothed"
        if norm is not None and bool((ratio != 1).any()):
            if facts.also_reads_the_norm:
                raise CheckpointError(
                    f"{experts.folder}: layer {layer}: {norm.tensor} was divided in {int((ratio != 1).sum())} of "
                    f"{len(ratio)} channels, but {' and '.join(facts.also_reads_the_norm)} read it too and would keep "
                    "the source's bytes: its experts fit the divided norm alone, so neither norm would be right for "
                    "both; give experts that were quantized without scales in this norm"
                )
            state = "compensated"  # as it is, if it does not read this norm
            if facts.router_follows:
                found = experts.tensor(experts.require(router, "the router").name)
                state = router_state(source.tensor(router), found, ratio)
        errors = [0.0, 0.0]
        for expert in sorted({0, sizes["experts"] // 2, sizes["experts"] - 1}):  # the audit reads all of them
            modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
            old, new = ([read_weight(c, module, device) for module in modules] for c in (source, experts))
            inner = not facts.of_layer(layer).own_gate
            for i, smooth in enumerate((ratio.to(device), torch.ones_like(ratio, device=device))):
                errors[i] = max(errors[i], *matrix_errors(old, new, smooth, inner=inner).tolist())
        if errors[0] >= CLOSE_ENOUGH:
            raise CheckpointError(
                f"{experts.folder}: layer {layer}: its experts are {errors[0]:.0%} away from the source's times the "
                "ratio of the norms; they were made from another model, or smoothed in another way"
            )
        layers.append(Layer(layer, int((ratio != 1).sum()), state, *errors))
    return layers


def describe(found: list[Layer]) -> list[str]:
    """What a user must know about `examine`'s findings, one line each."""
    smoothed = [layer for layer in found if layer.folded]
    if not smoothed:
        return ["no norm was smoothed: the source's routers fit"]
    affected = [layer.layer for layer in smoothed if layer.router == "not compensated"]
    lines = [
        f"norms smoothed in {len(smoothed)} of {len(found)} layers; confirmed on their experts: "
        f"{max(layer.error for layer in smoothed):.1%} off at most with the ratio of the norms, "
        f"{min(layer.error_unscaled for layer in smoothed):.0%} and more without"
    ]
    if affected:
        lines.append(
            f"router not compensated in {len(affected)} layers of the experts' checkpoint "
            f"({', '.join(map(str, affected[:8]))}{', …' if len(affected) > 8 else ''}): it chose other experts than "
            "the source while it was made"
        )
    return lines


def layer_tensors(
    plan: Plan, facts: Architecture, layer: int, source: Checkpoint, experts: Checkpoint, repair_router: bool
) -> dict[str, torch.Tensor]:
    """One layer's shard: packed experts and folded norm from `experts`, the rest from the source.

    Args:
        repair_router: write router * norm / norm'; otherwise the source's values. Both in the dtype that servers hold.

    Raises:
        CheckpointError: a tensor of `experts` is missing or has another shape than planned.
    """
    tensors: dict[str, torch.Tensor] = {}
    for action in plan.of_layer(layer):
        if action.kind in PASSTHROUGH:
            (name,) = action.outputs
            tensors[name] = source.tensor(action.source)
        elif action.kind == "fold":
            name = action.source
            # Stored in the source's dtype: bfloat16 for a norm that comes from a BF16 copy.
            tensors[name] = experts.tensor(experts.require(name, "the smoothed norm").name).to(
                source.tensor(name).dtype
            )
        elif action.kind == "quantize":
            for name, spec in action.outputs.items():
                tensor = experts.tensor(experts.require(name, "a part of a packed expert").name)
                if name.endswith("weight_scale"):
                    tensor = tensor.bfloat16()
                if tuple(tensor.shape) != spec.shape:
                    raise CheckpointError(
                        f"{experts.folder}: {name} has shape {list(tensor.shape)}, not {list(spec.shape)}"
                    )
                tensors[name] = tensor
    for action in plan.of_layer(layer):
        if action.kind == "compensate":
            router = source.tensor(action.source).float()
            if repair_router and facts.norm:
                (norm,) = (a.source for a in plan.of_layer(layer) if a.kind == "fold")
                router = router * norm_ratio(source.tensor(norm), tensors[norm], facts.norm.offset)
            tensors[action.source] = router.to(torch_dtype(action.outputs[action.source].dtype))
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


class Mixer(Consumer):
    """Writes each layer's shard into `work`/output, then its journal entry.

    Args:
        mix: what is mixed.
        repair_router: see `layer_tensors`.
    """

    needs: Need = "bytes"

    def __init__(self, mix: Mix, work: Path, *, repair_router: bool) -> None:
        self.mix, self.work, self.repair_router = mix, work, repair_router

    def after_source(self, step: LayerStep) -> None:
        """The shard of one layer."""
        plan, number = self.mix.plan, step.number
        tensors = layer_tensors(plan, self.mix.facts, number, step.source, self.mix.experts, self.repair_router)
        shard = plan.shard_file(number)
        kept = kept_hashes(plan, number, step.source)
        digest = write_shard(tensors, self.work / "output" / shard, kept, plan.unread(number))
        write_json(journal.layer_file(self.work, number), {"layer": number, "shard": shard, "digest": digest})


def write_mix(mix: Mix, work: Path, *, repair_router: bool, check: Callable[[], None]) -> dict[str, ShardDigest]:
    """Write the checkpoint into `work`/output; finished and undamaged layers of an earlier call are not written again.

    Args:
        repair_router: multiply the source's router by the ratio of the norms.
        check: called between steps; may raise to interrupt.

    Returns:
        The digests of the shards, by file name.
    """
    layers, plan = mix.sizes["layers"], mix.plan
    for layer in journal.damaged_shards(work, journal.done_layers(work, layers)):
        journal.layer_file(work, layer).unlink()  # so that it is stitched again
    journal.remove_cut_files(work)
    for name in ("layers", "output"):
        (work / name).mkdir(exist_ok=True)
    folder = work / "output"
    left = [layer for layer in range(layers) if not journal.layer_file(work, layer).exists()]
    tensors = {layer: [action.source for action in plan.of_layer(layer) if action.kind != "quantize"] for layer in left}
    mixer = Mixer(mix, work, repair_router=repair_router)
    with (
        progress("stitching", layers, layers - len(left)) as shown,
        closing(layer_steps(mix.source, tensors, [mixer], check=check)) as steps,
    ):
        for step in steps:
            shown(f"layer {step.number}")
    kept = {}
    for part in plan.passthrough_parts:
        parts = writing.layer_tensors(plan, part, mix.source, None).host
        kept[plan.shard_file(part)] = write_shard(parts, folder / plan.shard_file(part), carried=plan.unread(part))
    check()
    write_config_files(folder, mix.source, plan, mix.facts)
    written = {entry["shard"]: entry["digest"] for entry in journal.done_layers(work, layers)}
    return written | kept
