"""Values that take part in a count: tensors without numbers, tensors that nobody has touched, and what they lie in."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch

META = torch.device("meta")
SMALL = 2**20  # bytes: what is smaller is done on the host
RESERVE_NOTHING: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python knows the name from 3.13 on


def untouched(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU, of any size: only the pages that are written to take memory."""
    size = torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | RESERVE_NOTHING
    pages = mmap.mmap(-1, size.numel() * dtype.itemsize, flags=flags)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def form(tensor: torch.Tensor) -> Any:
    """What a function that is done once is known by, of each tensor that it gets."""
    return tensor.device.type, tensor.dtype, tensor.shape, tensor.stride()


def tensors_within(value: Any) -> list[torch.Tensor]:
    """The tensors in arguments; dataclasses are looked into as well."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, own.name) for own in dataclasses.fields(value)]
    elif isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value if not isinstance(item, int) for tensor in tensors_within(item)]


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A result with its tensors on the device replaced; dataclasses, mappings and tuples are looked into."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.is_meta else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{own.name: mapped(getattr(value, own.name), function) for own in dataclasses.fields(value)}
        )
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, function) for item in value)
    return value


def shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)


def numbers_of(leaf: Any) -> Any:
    """What large work on the host results in: zeros, or, of what is small, ones, by which may be divided."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return untouched(leaf.shape, leaf.dtype) if leaf.nbytes >= SMALL else torch.ones(leaf.shape, dtype=leaf.dtype)
