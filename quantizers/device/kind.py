"""The one question about a device on which the order and the shapes of the work depend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def accelerated(device: torch.device) -> bool:
    """Whether work on this device is launched and waited for, instead of done by this process's own threads.

    On such a device large batches are quicker, looking at a number is a synchronisation, and products of bfloat16 with
    float32 sums exist. It is asked of the device's type and not of CUDA, so that the same work can be counted on
    torch's meta device, where there is no GPU.
    """
    return device.type != "cpu"
