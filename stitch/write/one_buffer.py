"""Several arrays in one piece of memory, so that they come from a device to the host in one copy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")
Shape = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of one array
ALIGNMENT = 8  # bytes, of the widest dtype


def buffer_for(rooms: Mapping[Key, Shape], device: torch.device) -> torch.Tensor:
    """Memory for these arrays on `device`, uint8, not initialised."""
    return torch.empty(sum(_size(room) for room in rooms.values()), dtype=torch.uint8, device=device)


def arrays_in(buffer: torch.Tensor, rooms: Mapping[Key, Shape]) -> dict[Key, torch.Tensor]:
    """The arrays of a buffer that `buffer_for` made, or of a copy of it, as views."""
    arrays: dict[Key, torch.Tensor] = {}
    start = 0
    for key, (shape, dtype) in rooms.items():
        end = start + math.prod(shape) * dtype.itemsize
        arrays[key] = buffer[start:end].view(dtype).view(shape)
        start += _size((shape, dtype))
    return arrays


def _size(room: Shape) -> int:
    shape, dtype = room
    return math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
