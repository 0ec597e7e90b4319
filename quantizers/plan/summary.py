"""A plan as numbers and table rows, for `quantize plan` and report.json."""

from __future__ import annotations

import re
from collections import Counter

from quantizers.architectures.sizes import Sizes

from .plan import KEPT, Action, Plan, file_size, index_json

COUNTED = ("tensors", "bytes_before", "bytes_after")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole part of a name


def kind_of_tensor(name: str) -> str:
    """A tensor's name with `*` in place of layer and expert numbers."""
    return _NUMBER.sub("*", name)


def _kind(action: Action, plan: Plan) -> str:
    """The same, but the number of a layer that predicts further tokens is kept: it has other actions."""
    name = kind_of_tensor(action.source)
    return name.replace(".*.", f".{action.layer}.", 1) if action.layer in plan.mtp else name


def kinds(plan: Plan) -> list[dict[str, object]]:
    """Every kind of tensor with its action, count, and bytes before and after, in the order of the plan."""
    sums: dict[tuple[str, str], tuple[int, int, int]] = {}
    for action in plan.actions:
        key = _kind(action, plan), action.kind
        tensors, before, after = sums.get(key, (0, 0, 0))
        written = sum(spec.bytes for spec in action.outputs.values())
        sums[key] = tensors + 1, before + action.spec.bytes, after + written
    return [
        {"kind": name, "action": kind, "tensors": tensors, "bytes_before": before, "bytes_after": after}
        for (name, kind), (tensors, before, after) in sums.items()
    ]


def listing(plan: Plan) -> list[dict[str, object]]:
    """Every source tensor with its action and the tensors written for it, in the order of the shards."""
    return [
        {
            "source": action.source,
            "dtype": action.spec.dtype,
            "shape": list(action.spec.shape),
            "action": action.kind,
            "shard": plan.shard_file(action.layer),
            "outputs": {name: [spec.dtype, list(spec.shape)] for name, spec in action.outputs.items()},
        }
        for action in plan.actions
    ]


def summary(plan: Plan, sizes: Sizes) -> dict[str, object]:
    """The plan in numbers: tensors and bytes by kind of action, output size, source size of a layer."""
    by_kind, table = kinds(plan), dict[str, Counter[str]]()
    for row in by_kind:
        table.setdefault(str(row["action"]), Counter()).update({key: row[key] for key in COUNTED})
    shards = {file: file_size(tensors) for file, tensors in plan.shards().items()}
    source = Counter[int | None]()  # bytes of each layer
    for action in plan.actions:
        source[action.layer] += action.spec.bytes
    layer_source = max(source[layer] for layer in range(plan.layers))
    index = len(index_json(plan).encode())
    return {
        "layers": sizes["layers"],
        "dense_layers": sorted(sizes.dense),
        "experts_per_layer": sizes["experts"],
        "quantized_matrices": plan.counts()["quantize"],
        "kept_attention_tensors": sum(".self_attn." in a.source for a in plan.actions if a.kind in KEPT),
        "actions": table,
        "kinds": by_kind,
        "source_bytes": source.total(),
        "expert_bytes": table["quantize"]["bytes_after"],
        "output_bytes": sum(shards.values()) + index,
        "index_bytes": index,
        "shards": shards,
        "layer_source_bytes": layer_source,
    } | ({"mtp": {"layers": list(plan.mtp), "bytes": sum(source[n] for n in plan.mtp)}} if plan.mtp else {})
