"""What the card says of the parts that a model has besides attention and routed experts, and of norms and routers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SHARED = ".shared_expert"  # in the names of the matrices of experts that every token passes through


def folds(plan: dict[str, Any]) -> bool:
    """Whether scales were folded into norms, and routers compensated for them."""
    return "fold" in plan["actions"]


def smoothing(plan: dict[str, Any]) -> str:
    """Which of AWQ's scales there are."""
    if folds(plan):
        return "AWQ scales from the calibration sums, folded into the norm and compensated in the router"
    why = ": the shared experts read these norms too" if _has_shared(plan) else ""
    return f"AWQ scales from the calibration sums within each expert (no norm and no router is changed{why})"


def kept(plan: dict[str, Any]) -> list[str]:
    """A paragraph on layers without experts, shared experts, and layers that predict further tokens, if it has any.

    Args:
        plan: the report's.
    """
    dense, mtp = plan.get("dense_layers", []), plan.get("mtp")
    if not (dense or mtp or _has_shared(plan)):
        return []
    modules = ", ".join(f"`{name}`" for name in _attention(plan))
    parts = [f"attention ({modules})"]
    if dense:
        parts.append(f"the MLP of layer{'s' if dense[1:] else ''} {', '.join(map(str, dense))}, without routed experts")
    if _has_shared(plan):
        parts.append("the shared experts")
    lines = [f"Kept, {_form(plan)}: {'; '.join(parts)}."]
    if mtp:
        layers = ", ".join(map(str, mtp["layers"]))
        whole = "Layer {} predicts" if not mtp["layers"][1:] else "Layers {} predict"
        lines.append(
            f"{whole.format(layers)} further tokens, for speculative decoding (MTP): kept whole, routed experts "
            f"{_form(plan)} too ({mtp['bytes'] / 1e9:.1f} GB)."
        )
    return ["", " ".join(lines)]


def _has_shared(plan: dict[str, Any]) -> bool:
    return any(SHARED in row["kind"] for row in plan["kinds"])


def _attention(plan: dict[str, Any]) -> Iterator[str]:
    """The names of its linear modules."""
    names = (row["kind"].rpartition(".self_attn.")[2] for row in plan["kinds"] if ".self_attn." in row["kind"])
    weights = (name.removesuffix(".weight") for name in names if name.endswith(".weight") and "norm" not in name)
    return iter(dict.fromkeys(weights))


def _form(plan: dict[str, Any]) -> str:
    if any(row["action"] == "keep" and row["kind"].endswith(".weight_scale") for row in plan["kinds"]):
        return "in FP8 with a scale per row"
    return "in FP8 with a scale per block" if "rename" in plan["actions"] else "in 16 bits"
