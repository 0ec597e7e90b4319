"""Builds the layers of a mixed checkpoint from the FP8 source and an experts-only checkpoint made from a BF16 copy.

Packed experts, and the norms that their smoothing was folded into, come from the experts-only checkpoint;
everything else keeps the source's bytes. The published FrankenQuant was made this way, and has this defect:
AWQ divided the norm before the experts by s and multiplied the experts by s, but the router, which reads the
same norm, comes from the source and was not multiplied. So before anything is written, each layer's norms are
compared, their ratio is confirmed on some experts, and the router is checked for compensation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.matrices import MATRICES
from quantizers.architectures.sizes import Sizes
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.tensor_bytes import torch_dtype
from quantizers.forward.smoothing import CLOSE_ENOUGH, matrix_errors, norm_ratio, router_state, stored_norm_ratio
from quantizers.forward.weights import read_weight
from quantizers.output import journal
from quantizers.plan.plan import KEPT, Plan
from quantizers.system.errors import CheckpointError
from quantizers.system.files import write_json
from stitch.write.shard import write_shard

PROBED = 3  # experts per layer on which the ratio of the norms is confirmed; the audit reads all of them
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
    layers = []
    for layer in sizes.moe_layers:
        ratio = stored_norm_ratio(source, experts, facts.layer(layer, facts.norm.tensor), facts.norm.offset)
        router = facts.layer(layer, facts.router.tensor)
        state: Router = "not smoothed"
        if bool((ratio != 1).any()):
            if facts.also_reads_the_norm:
                raise CheckpointError(
                    f"{experts.folder}: layer {layer}: {facts.norm.tensor} was divided in {int((ratio != 1).sum())} of "
                    f"{len(ratio)} channels, but {' and '.join(facts.also_reads_the_norm)} read it too and would keep "
                    "the source's bytes: its experts fit the divided norm alone, so neither norm would be right for "
                    "both; give experts that were quantized without scales in this norm"
                )
            state = router_state(
                source.tensor(router), experts.tensor(experts.require(router, "the router").name), ratio
            )
        errors = [0.0, 0.0]
        for expert in sorted({0, sizes["experts"] // 2, sizes["experts"] - 1})[:PROBED]:
            modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
            old, new = ([read_weight(c, module, device) for module in modules] for c in (source, experts))
            for i, smooth in enumerate((ratio.to(device), torch.ones_like(ratio, device=device))):
                errors[i] = max(errors[i], *matrix_errors(old, new, smooth).tolist())
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
        if action.kind in KEPT:
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
            if repair_router:
                (norm,) = (a.source for a in plan.of_layer(layer) if a.kind == "fold")
                router = router * norm_ratio(source.tensor(norm), tensors[norm], facts.norm.offset)
            tensors[action.source] = router.to(torch_dtype(action.outputs[action.source].dtype))
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def write_layers(
    plan: Plan,
    facts: Architecture,
    source: Checkpoint,
    experts: Checkpoint,
    work: Path,
    *,
    repair_router: bool,
    step: Callable[[str], None] = lambda _: None,
) -> None:
    """Write each layer's shard into `work`/output, then its journal entry; layers that have an entry are skipped."""
    for layer in range(plan.layers):
        if not journal.layer_file(work, layer).exists():
            shard = plan.shard_file(layer)
            tensors = layer_tensors(plan, facts, layer, source, experts, repair_router)
            digest = write_shard(tensors, work / "output" / shard, carried=plan.carried(layer))
            write_json(journal.layer_file(work, layer), {"layer": layer, "shard": shard, "digest": digest})
        step(f"layer {layer}")


def as_rows(found: list[Layer]) -> list[dict[str, Any]]:
    """For report.json."""
    return [asdict(layer) for layer in found]
