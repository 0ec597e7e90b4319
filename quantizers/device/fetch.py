"""Numbers from the device, in one copy: on an accelerator every look at a number waits for all that is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def fetched(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors on the CPU, in float64, which holds whole numbers up to 2^53; one synchronisation for all.

    Args:
        tensors: small ones, of any number type and shape, all on one device; there may be none.
    """
    if not tensors:
        return {}
    flat = on_host(torch.cat([tensor.flatten().double() for tensor in tensors.values()]))
    parts = torch.split(flat, [math.prod(tensor.shape) for tensor in tensors.values()])
    return {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU. All looks of the engine go through here, so that they can be counted."""
    return tensor.cpu()
