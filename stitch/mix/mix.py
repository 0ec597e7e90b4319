"""Puts a mixed checkpoint together: what belongs together, and its files. layers.py builds the layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import Sizes, sizes_of
from quantizers.checkpoint.formats import readable
from quantizers.checkpoint.fused_experts import with_experts_apart
from quantizers.checkpoint.reader import CONFIG, Checkpoint, block_size
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.checkpoint.swapped import refuse_swapped
from quantizers.output import journal
from quantizers.plan.making import make_plan
from quantizers.plan.plan import Plan
from quantizers.recipe.schema import Experts
from quantizers.system.errors import CheckpointError
from quantizers.system.progress import checked, progress
from stitch.audit.infer_scheme import stored_schemes
from stitch.write.config_files import write_config_files
from stitch.write.digests import ShardDigest
from stitch.write.shard import layer_tensors, write_shard

from .layers import Layer, examine, write_layers


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


def belong_together(source: Checkpoint, experts: Checkpoint, device: torch.device, own: Path | None = None) -> Mix:
    """Find out whether and how two checkpoints can be mixed; nothing is written.

    Args:
        source: the FP8 checkpoint.
        experts: an experts-only checkpoint made from a BF16 copy of it, by any tool.
        own: a file with the user's own facts about the family.

    Raises:
        CheckpointError: the two do not belong together, were given the wrong way round, or have a format that cannot
            be stitched.
    """
    refuse_swapped(source, experts, f"--source {experts.name} --experts {source.name}")
    where = str(source.folder / CONFIG)
    facts = architecture_for(source.config, where, own)
    sizes = sizes_of(facts, source.config, where)
    source = with_experts_apart(source, facts, sizes)
    config_path = str(experts.folder / CONFIG)
    if sizes_of(architecture_for(experts.config, config_path, own), experts.config, config_path) != sizes:
        raise CheckpointError(f"{config_path}: is another model than {source.name}; give one made from a copy of it")
    renamed = readable(experts, facts)
    schemes = stored_schemes(renamed, facts, sizes)
    found = examine(source, renamed, facts, sizes, device)
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, sizes, specs, Experts(), str(source.folder), block_size(source))
    plan = plan.with_schemes(schemes).with_norms_kept([layer.layer for layer in found if not layer.folded])
    return Mix(source, renamed, facts, sizes, plan, found)


def write_mix(mix: Mix, work: Path, *, repair_router: bool, check: Callable[[], None]) -> dict[str, ShardDigest]:
    """Write the checkpoint into `work`/output; layers that an earlier call has finished are kept if they are undamaged.

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
    with progress("stitching", layers) as step:
        write_layers(
            plan, mix.facts, mix.source, mix.experts, work, repair_router=repair_router, step=checked(step, check)
        )
    kept = {}
    for part in plan.kept_parts:
        tensors = layer_tensors(plan, part, mix.source, None).host
        kept[plan.shard_file(part)] = write_shard(tensors, folder / plan.shard_file(part), carried=plan.carried(part))
    write_config_files(folder, mix.source, plan, mix.facts)
    written = {entry["shard"]: entry["digest"] for entry in journal.done_layers(work, layers)}
    return written | kept
