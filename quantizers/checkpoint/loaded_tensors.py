"""Parts of a checkpoint in memory, usually a decoder layer: read once, each tensor hashed as it arrives.

A part answers as the checkpoint itself does, but for its own tensors only: reading any other is an error, so nothing
is read from a file a second time unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantizers.architectures.architecture import Architecture
from quantizers.system.thread_map import thread_map

from .reader import Checkpoint, as_bytes, as_tensor, read_into
from .safetensors_header import TORCH_DTYPES, TensorInfo

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes, of each tensor in a buffer


@dataclass(frozen=True)
class LoadedTensors(Checkpoint):
    """Some tensors of a checkpoint; `tensors` lists no others.

    Attributes:
        stored: the tensors, contiguous. Every call of `tensor` returns the same memory, which must not be written to.
        hashes: their SHA-256, hexadecimal, taken when they were read; empty if they were not read from a file.
        buffer: the bytes uint8 (N,) of which the tensors are views; None if each has memory of its own.
    """

    stored: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    buffer: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def raw(self, name: str) -> bytearray:
        """A copy of one tensor's bytes."""
        return bytearray(as_bytes(self.stored[name].cpu()))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, not to be changed."""
        return self.stored[name]

    def sha256(self, name: str) -> str:
        """The hash on arrival; that of the memory where the tensor did not arrive from a file."""
        if name in self.hashes:
            return self.hashes[name]
        return hashlib.sha256(as_bytes(self.stored[name].cpu())).hexdigest()

    def digest(self) -> str:
        """SHA-256, hexadecimal, over all names and hashes."""
        lines = "".join(f"{name}\0{self.sha256(name)}\n" for name in sorted(self.tensors))
        return hashlib.sha256(lines.encode()).hexdigest()

    def only(self, names: Iterable[str]) -> LoadedTensors:
        """These tensors alone, copied out of the buffer, so that the memory of the others can be freed."""
        names = list(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            stored={name: self.stored[name] if self.buffer is None else self.stored[name].clone() for name in names},
            hashes={name: self.hashes[name] for name in names if name in self.hashes},
            buffer=None,
        )

    def to(self, device: torch.device, prefetched: torch.Tensor | None = None) -> LoadedTensors:
        """The same part on a device, its buffer copied as a whole; itself on a CPU.

        Args:
            prefetched: the buffer's bytes, if they are on the device already.
        """
        if device.type == "cpu" and prefetched is None:
            return self
        moved = self.buffer.to(device) if self.buffer is not None and prefetched is None else prefetched
        stored = {}
        for name, tensor in self.stored.items():
            if moved is not None and self.holds(tensor):
                start = tensor.storage_offset() * tensor.element_size()
                stored[name] = as_tensor(self.tensors[name], moved[start : start + tensor.nbytes])
            else:
                stored[name] = tensor.to(device)
        return replace(self, stored=stored, buffer=moved)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the part's buffer, which gets other bytes when the part is emptied."""
        storage = None if self.buffer is None else self.buffer.untyped_storage().data_ptr()
        return tensor.untyped_storage().data_ptr() == storage

    def empty(self) -> None:
        """Forget the tensors, since their memory gets other bytes. Names, hashes and the digest stay."""
        self.stored.clear()


def bytes_needed(infos: Iterable[TensorInfo]) -> int:
    """The size of a buffer for these tensors."""
    return sum(_aligned(info.size) for info in infos)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def layer_names(checkpoint: Checkpoint, facts: Architecture, number: int) -> list[str]:
    """The names of a layer's tensors in a checkpoint."""
    prefix = facts.layer(number, "")
    return [name for name in checkpoint.tensors if name.startswith(prefix)]


def outside_names(checkpoint: Checkpoint, facts: Architecture) -> list[str]:
    """The names of what a model needs outside its layers, the head in whichever format it is stored.

    Raises:
        CheckpointError: one is missing.
    """
    module = facts.head.removesuffix(".weight")
    head = [name for name in checkpoint.tensors if name.rpartition(".")[0] == module] or [facts.head]
    others = [name for name in facts.outside if name != facts.head]
    return [checkpoint.require(name, "a tensor outside the layers").name for name in (*others, *head)]


def load_tensors(
    checkpoint: Checkpoint,
    names: Iterable[str],
    stop: Event | None = None,
    buffer: torch.Tensor | None = None,
) -> LoadedTensors:
    """Read some tensors into memory, in the order of their bytes.

    Args:
        stop: reading ends early once this is set; what is returned then is of no use.
        buffer: uint8 (N,) on the CPU, where they are put; None, or one that is too small, for a new one.

    Raises:
        CheckpointError: a file is gone or has shrunk since its header was read, or a dtype is unknown.
    """
    import torch

    infos = {name: checkpoint.tensors[name] for name in names}
    size = bytes_needed(infos.values())
    if buffer is None or len(buffer) < size:
        buffer = torch.empty(size, dtype=torch.uint8)
    used, stored, hashes = buffer[:size], dict[str, torch.Tensor](), dict[str, str]()
    arriving = _arriving([replace(info, name=name) for name, info in infos.items()], used, stop or Event())
    with closing(thread_map(_hashed, arriving)) as hashed:  # while the next tensors are read
        for info, raw, digest in hashed:
            hashes[info.name] = digest
            stored[info.name] = as_tensor(info, raw)
    like = checkpoint
    return LoadedTensors(like.folder, like.name, like.config, infos, like.revision, stored, hashes, used)


def _hashed(arrived: tuple[TensorInfo, torch.Tensor]) -> tuple[TensorInfo, torch.Tensor, str]:
    info, raw = arrived
    return info, raw, hashlib.sha256(as_bytes(raw)).hexdigest()


def _arriving(infos: list[TensorInfo], buffer: torch.Tensor, stop: Event) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """Each tensor's header entry and bytes as soon as it has been read to its place in the buffer."""
    infos.sort(key=lambda info: (info.file, info.start, info.end))
    places = accumulate((_aligned(info.size) for info in infos), initial=0)
    views = [buffer[place : place + info.size] for info, place in zip(infos, places, strict=False)]
    reading = read_into((info, as_bytes(view)) for info, view in zip(infos, views, strict=True) if not stop.is_set())
    yield from zip(reading, views, strict=False)


def tensors_in_memory(like: Checkpoint, tensors: Mapping[str, torch.Tensor], file: Path) -> LoadedTensors:
    """Tensors that are about to be written to `file`, as a reader of the finished checkpoint will find them.

    Args:
        like: gives folder, name and config.
        tensors: on the CPU, contiguous.
    """
    spelled = {f"torch.{name}": dtype for dtype, name in TORCH_DTYPES.items()}
    infos = {
        name: TensorInfo(name, spelled[str(tensor.dtype)], tuple(tensor.shape), file, 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    return LoadedTensors(like.folder, like.name, like.config, infos, like.revision, dict(tensors))
