"""From the bytes of a safetensors file to tensors, and back, without a copy."""

from __future__ import annotations

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


def read_bytes(info: TensorInfo) -> bytearray:
    """The bytes of one tensor, and not one more: nothing is read ahead.

    Raises:
        CheckpointError: the file is gone or has shrunk since its header was read.
    """
    buffer = bytearray(info.size)
    view, got = memoryview(buffer), 0
    try:
        with info.file.open("rb", buffering=0) as stream:
            stream.seek(info.start)
            while got < info.size:
                count = stream.readinto(view[got:])  # at most 2 GiB at a time
                if not count:
                    raise CheckpointError(f"{info.file}: {info.name}: the file is truncated; download this shard again")
                got += count
    except OSError as failure:
        raise CheckpointError(
            f"{info.file}: {info.name}: cannot be read ({failure.strerror}); check the disk"
        ) from None
    return buffer


def as_tensor(info: TensorInfo, raw: bytearray) -> torch.Tensor:
    """View bytes as a tensor with the dtype and shape from the header, without a copy."""
    import torch

    name = DTYPES.get(info.dtype)
    if name is None:
        raise CheckpointError(f"{info.file}: {info.name}: dtype {info.dtype} cannot be read")
    dtype: torch.dtype = getattr(torch, name)
    if info.size == 0:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(info.shape)


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
