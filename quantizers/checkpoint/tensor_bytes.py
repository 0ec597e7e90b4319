"""From the bytes of a safetensors file to tensors, and back, without a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quantizers.system.errors import CheckpointError

from .safetensors_header import TensorInfo

if TYPE_CHECKING:
    import torch

# dtypes in safetensors' spelling that torch can hold, and torch's names for them
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


def read_into(file: Path, start: int, view: memoryview, name_at: Callable[[int], str]) -> None:
    """Fill memory with a file's bytes from `start` on, and not one more: nothing is read ahead.

    Args:
        view: writable bytes.
        name_at: the tensor that a byte of `view` belongs to, by its position; for messages.

    Raises:
        CheckpointError: the file is gone or has shrunk since its header was read.
    """
    got = 0
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while got < len(view):
                count = stream.readinto(view[got:])  # at most 2 GiB at a time
                if not count:
                    raise CheckpointError(f"{file}: {name_at(got)}: the file is truncated; download this shard again")
                got += count
    except OSError as failure:
        raise CheckpointError(f"{file}: {name_at(got)}: cannot be read ({failure.strerror}); check the disk") from None


def read_bytes(info: TensorInfo) -> bytearray:
    """The bytes of one tensor; raises as `read_into`."""
    buffer = bytearray(info.size)
    read_into(info.file, info.start, memoryview(buffer), lambda _: info.name)
    return buffer


def as_tensor(info: TensorInfo, raw: bytearray | torch.Tensor) -> torch.Tensor:
    """View bytes as a tensor with the dtype and shape from the header.

    Args:
        raw: its bytes, from Python or as a uint8 tensor (size,) on any device.

    Returns:
        A view without a copy; a copy where the bytes of a uint8 tensor do not begin at a multiple of the dtype's size.
    """
    import torch

    name = DTYPES.get(info.dtype)
    if name is None:
        raise CheckpointError(f"{info.file}: {info.name}: dtype {info.dtype} cannot be read")
    dtype: torch.dtype = getattr(torch, name)
    if info.size == 0:
        return torch.empty(info.shape, dtype=dtype, device=raw.device if isinstance(raw, torch.Tensor) else None)
    if not isinstance(raw, torch.Tensor):
        return torch.frombuffer(raw, dtype=dtype).view(info.shape)
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy().data


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype, from one of DTYPES in safetensors' spelling."""
    import torch

    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in safetensors' spelling."""
    return next(name for name, own in DTYPES.items() if f"torch.{own}" == str(dtype))
