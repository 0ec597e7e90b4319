"""Whether facts and transformers' own classes fit: the kept ones do, and the user's own may not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.system.errors import ArchitectureError


def class_of(facts: Architecture) -> Any:
    """transformers' class of the whole model.

    Raises:
        ArchitectureError: transformers has none of this name.
    """
    import transformers

    found = getattr(transformers, facts.model_class, None)
    if not hasattr(found, "config_class"):
        raise ArchitectureError(
            f"the facts of {facts.model_type}: model_class: transformers {transformers.__version__} has no "
            f"{facts.model_class}; give one that computes this model"
        )
    return found


def load_layer(
    layer: torch.nn.Module,
    weights: Mapping[str, torch.Tensor],
    facts: Architecture,
    left_out: Collection[str] = (),
) -> None:
    """Give a decoder layer its weights, every one of them and no other.

    Args:
        weights: by transformers' names, see weights.py.
        left_out: those that the layer has and is not to be given now.

    Raises:
        ArchitectureError: the layer has no place for one, wants another, or has another shape for it.
    """
    about = f"the facts of {facts.model_type}"
    try:
        missing, unknown = layer.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as failure:
        reason = " ".join(str(failure).split()).removeprefix("Error(s) in loading state_dict for ")
        raise ArchitectureError(f"{about}: transformers' layer has other shapes ({reason})") from None
    if unknown:
        raise ArchitectureError(
            f"{about}: transformers' layer has no place for {unknown[0]}; if the model computes without it, add its "
            "published name to modules.without"
        )
    missing = [name for name in missing if name not in left_out]
    if missing:
        raise ArchitectureError(
            f"{about}: transformers' layer needs {missing[0]}; name it among its tensors or linears, or take it out of "
            "modules.without"
        )


def require_plain_experts(experts: torch.nn.Module, facts: Architecture) -> None:
    """Refuse experts that compute anything else than act(gate) * up, for example a clamped product.

    The sums of what w2 reads are made with that product, and the scale between w3 and w2 is exact for it alone.

    Raises:
        ArchitectureError: transformers' class has a product of its own.
    """
    own = getattr(type(experts), "_apply_gate", None)
    if own is not None and own.__module__ != "transformers.integrations.moe":
        raise ArchitectureError(
            f"the facts of {facts.model_type}: experts of {type(experts).__name__} do not compute act(gate) * up but a "
            "product of their own, which this program does not know; such a model cannot be quantized with it"
        )
