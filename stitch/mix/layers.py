"""A mixed checkpoint from what exists: the FP8 source, and an experts-only checkpoint made from a BF16 copy of it.

Packed experts and the norms that they were smoothed with come from the one; everything else keeps the
source's bytes. That is how the published FrankenQuant was made, and where it goes wrong: AWQ divided
the norm before the experts by s, the experts carry s, but the router, which reads the same norm, comes
from the source and does not. So before anything is written, each layer's norms are compared, the ratio
is confirmed on experts, and the router's compensation is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quantizers.architectures.architecture import Architecture, Sizes
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.reader import Checkpoint
from quantizers.forward.smoothing import CLOSE_ENOUGH, matrix_errors, norm_ratio, router_state
from quantizers.forward.weights import read_weight
from quantizers.output import journal
from quantizers.plan.plan import Plan
from quantizers.system.atomic import write_json
from quantizers.system.errors import CheckpointError
from stitch.write.shard import write_shard

PROBED = 3  # experts of each layer that the ratio of the norms is confirmed on; the audit reads them all
Router = Literal["not smoothed", "compensated", "not compensated", "unclear"]


@dataclass(frozen=True)
class Layer:
    """What the experts' checkpoint did to one layer.

    Attributes:
        layer: its number.
        folded: channels of the norm that were divided.
        router: what the experts' checkpoint did with its own router.
        error: largest relative error of the probed experts, given the ratio of the norms.
        error_unscaled: the same, had the experts not been smoothed.
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
        CheckpointError: a layer's experts are not the source's times the ratio of the norms.
    """
    found = []
    for layer in range(sizes["layers"]):
        ratio = norm_ratio(source, experts, facts.layer(layer, facts.fold.norm))
        router = facts.layer(layer, facts.fold.router)
        state: Router = "not smoothed"
        if bool((ratio != 1).any()):
            state = router_state(
                source.tensor(router), experts.tensor(experts.require(router, "the router").name), ratio
            )
        worst = [0.0, 0.0]
        for expert in sorted({0, sizes["experts"] // 2, sizes["experts"] - 1})[:PROBED]:
            modules = [facts.expert(layer, expert, matrix) for matrix in MATRICES]
            old, new = ([read_weight(c, module, device) for module in modules] for c in (source, experts))
            for i, smooth in enumerate((ratio.to(device), torch.ones_like(ratio, device=device))):
                worst[i] = max(worst[i], *matrix_errors(old, new, smooth))
        if worst[0] >= CLOSE_ENOUGH:
            raise CheckpointError(
                f"{experts.folder}: layer {layer}: its experts are {worst[0]:.0%} away from the source's times the "
                "ratio of the norms; they were made from another model, or smoothed in another way"
            )
        found.append(Layer(layer, int((ratio != 1).sum()), state, *worst))
    return found


def describe(found: list[Layer]) -> list[str]:
    """What a user must know of `examine`'s findings, one line each."""
    smoothed = [layer for layer in found if layer.folded]
    if not smoothed:
        return ["no norm was smoothed: the source's routers fit"]
    bare = [layer.layer for layer in smoothed if layer.router == "not compensated"]
    lines = [
        f"norms smoothed in {len(smoothed)} of {len(found)} layers; confirmed on their experts: "
        f"{max(layer.error for layer in smoothed):.1%} off at most with the ratio of the norms, "
        f"{min(layer.error_unscaled for layer in smoothed):.0%} and more without"
    ]
    if bare:
        lines.append(
            f"router not compensated in {len(bare)} layers of the experts' checkpoint ({', '.join(map(str, bare[:8]))}"
            f"{', …' if len(bare) > 8 else ''}): it chose other experts than the source while it was made"
        )
    return lines


def layer_tensors(
    plan: Plan, layer: int, source: Checkpoint, experts: Checkpoint, repair_router: bool
) -> dict[str, torch.Tensor]:
    """One layer's shard: packed experts and folded norm from `experts`, the rest from the source.

    Args:
        repair_router: write router * norm / norm', in float32; else the source's values.

    Raises:
        CheckpointError: a tensor of `experts` is missing or not as the plan says.
    """
    tensors: dict[str, torch.Tensor] = {}
    for action in plan.of_layer(layer):
        if action.kind in ("keep", "rename"):
            (name,) = action.outputs
            tensors[name] = source.tensor(action.source)
        elif action.kind == "fold":
            name = action.source
            # Read back as the source's dtype, in which it is stored: bfloat16 for what a BF16 copy gave.
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
                before, after = source.tensor(norm).float(), tensors[norm].float()
                router = router * torch.where(after != 0, before / after, torch.ones_like(before))
            tensors[action.source] = router
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def write_layers(
    plan: Plan,
    source: Checkpoint,
    experts: Checkpoint,
    repair_router: bool,
    work: Path,
    step: Callable[[str], None] = lambda _: None,
) -> None:
    """All layers' shards, into `work`/output, each with its entry in the journal; those that have one are done."""
    for layer in range(plan.layers):
        if not journal.layer_file(work, layer).exists():
            shard = plan.shard_file(layer)
            tensors = layer_tensors(plan, layer, source, experts, repair_router)
            digest = write_shard(tensors, work / "output" / shard)
            write_json(journal.layer_file(work, layer), {"layer": layer, "shard": shard, "digest": digest})
        step(f"layer {layer}")


def as_rows(found: list[Layer]) -> list[dict[str, Any]]:
    """For report.json."""
    return [asdict(layer) for layer in found]
