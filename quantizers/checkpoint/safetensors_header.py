"""The header of a safetensors file: names, dtypes, shapes and byte ranges, read without the data.

The safetensors library maps whole files and keeps their pages resident, but plan, audit and reading a layer need only
byte ranges. Headers are user input, so everything in them is validated here.
"""

from __future__ import annotations

import contextlib
import json
import math
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeGuard

from quantizers.system.errors import CheckpointError

MAX_HEADER = 100_000_000  # the format's own limit
# In the library's order of dtypes; it writes a file's tensors sorted by dtype in the reverse of this order.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
# Those that torch can hold, and torch's names for them.
TORCH_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
FP8 = "F8_E4M3"  # as safetensors spells float8_e4m3fn
FLOATING = ("BF16", "F16", "F32")


class Columns(NamedTuple):
    """Columns of a stored matrix (C, total), `first` and every `step`-th after it, which are the rows of one (R, C)."""

    total: int
    first: int
    step: int


class Rows(NamedTuple):
    """Rows of a stored matrix, `first` and every `step`-th after it."""

    first: int
    step: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file: its dtype in safetensors' spelling, its byte range counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    part: Columns | Rows | None = None  # of what the range holds, if that is not this tensor alone

    @property
    def size(self) -> int:
        """Number of bytes in the range; of a part more than its own."""
        return self.end - self.start

    @property
    def before(self) -> int:
        """Number of elements of the range that come before its first one."""
        if self.part is None:
            return 0
        return self.part.first * (self.shape[1] if isinstance(self.part, Rows) else 1)


def printed(name: str) -> str:
    """A name from a file, escaped if needed, because an error message must be one line."""
    return name if name.isprintable() else repr(name)


@contextlib.contextmanager
def read_errors(file: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file."""
    try:
        yield
    except OSError as failure:
        raise CheckpointError(file, f"cannot be read ({failure.strerror or failure})", "check the folder") from None


def _corrupt(where: object, what: str) -> CheckpointError:
    return CheckpointError(where, what, "download this shard again")


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Every tensor of a safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: one line naming the file and, if possible, the tensor: it is truncated, overlaps
            another, has an unknown dtype, or its size contradicts its shape.
    """
    with read_errors(file), file.open("rb") as stream:
        length, begun = file.stat().st_size, stream.read(8)
        return parse_header(file, length, begun + stream.read(min(header_length(begun), MAX_HEADER)))


def header_length(begun: bytes) -> int:
    """Bytes of a file's header, from the first 8 bytes of the file."""
    return int.from_bytes(begun[:8], "little")


def parse_header(file: Path, length: int, begun: bytes) -> dict[str, TensorInfo]:
    """The same from the file's length and its first bytes, with the whole header, if they are not on the disk."""
    start = header_length(begun)
    if length < 8 or start > MAX_HEADER or 8 + start > length:
        raise _corrupt(file, "the header is cut off or corrupt")
    try:
        header = json.loads(begun[8:])
    except (ValueError, RecursionError):
        raise _corrupt(file, "the header is not JSON") from None
    if not isinstance(header, dict):
        raise _corrupt(file, "the header is not a table of tensors")
    end = base = 8 + start
    infos = [_entry(file, name, entry, base, length) for name, entry in header.items() if name != "__metadata__"]
    infos.sort(key=lambda info: (info.start, info.end))
    for info in infos:
        if info.start != end:
            what = "overlaps another" if info.start < end else "leaves a gap before it"
            raise _corrupt(f"{file}: {info.name}", f"its byte range {what}")
        end = info.end
    if end != length:
        raise _corrupt(file, f"has {length - end:,} bytes after its last tensor")
    return {info.name: info for info in infos}


def _entry(file: Path, name: str, entry: object, base: int, length: int) -> TensorInfo:
    where = f"{file}: {printed(name)}"
    if not name.isprintable():
        raise _corrupt(where, "a name with control characters")
    if not isinstance(entry, dict):
        raise _corrupt(where, "its header entry is no table")
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _corrupt(where, f"unknown dtype {reprlib.repr(dtype)}")
    if not _is_list_of_sizes(shape):
        raise _corrupt(where, f"shape {reprlib.repr(shape)} is not a list of sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise _corrupt(where, f"byte range {reprlib.repr(offsets)} is not two offsets")
    if base + offsets[1] > length:
        raise _corrupt(where, f"the file is truncated: it has {length:,} bytes and ends before this tensor does")
    if offsets[1] - offsets[0] != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise _corrupt(where, f"{offsets[1] - offsets[0]} bytes do not hold {dtype} {reprlib.repr(shape)}")
    return TensorInfo(name, dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def _is_list_of_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


@dataclass(frozen=True)
class Spec:
    """Dtype (in safetensors' spelling) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def bytes(self) -> int:
        """Number of data bytes."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


Stored = TensorInfo | Spec  # a tensor of a file, or of a plan: both have dtype and shape
