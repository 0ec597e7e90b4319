"""Parts of a checkpoint in memory: read once, each tensor hashed as it arrives.

A part is whatever is used together, usually a decoder layer. It answers as the checkpoint itself does, but for its own
tensors only: reading any other is an error, so nothing can be read from a file a second time unnoticed.

Tensors that lie next to each other in a file are read together, into one buffer of which they are views. prefetch.py
reads one part after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantizers.architectures.architecture import Architecture
from quantizers.system.thread_map import thread_map

from .reader import Checkpoint
from .safetensors_header import TensorInfo
from .tensor_bytes import as_bytes, as_tensor, dtype_name, read_into

if TYPE_CHECKING:
    import torch

ALIGNMENT = 8  # of a range's first byte; a header's size is padded to it, and no dtype is larger
PIECE = 2**30  # bytes read between two looks at `stop`


@dataclass(frozen=True)
class LoadedTensors(Checkpoint):
    """Some tensors of a checkpoint; `tensors` lists no others.

    Attributes:
        stored: the tensors, contiguous. Every call of `tensor` returns the same memory, so nobody may write into it.
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
        """The same with these tensors alone, so that the memory of the others can be freed.

        Those that are views of a buffer are copied, since they would keep all of it alive.
        """
        kept = list(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in kept},
            stored={name: self.stored[name] if self.buffer is None else self.stored[name].clone() for name in kept},
            hashes={name: self.hashes[name] for name in kept if name in self.hashes},
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
            if moved is not None and self.buffer is not None and _shares(tensor, self.buffer):
                start = tensor.storage_offset() * tensor.element_size()
                stored[name] = as_tensor(self.tensors[name], moved[start : start + tensor.nbytes])
            else:
                stored[name] = tensor.to(device)
        return replace(self, stored=stored, buffer=moved)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the part's own memory, which gets other bytes when the part is emptied."""
        return self.buffer is not None and _shares(tensor, self.buffer)

    def empty(self) -> None:
        """Forget the tensors, since their memory gets other bytes. Names, hashes and the digest stay."""
        self.stored.clear()


def _shares(tensor: torch.Tensor, buffer: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Range:
    """Tensors that lie next to each other in a file.

    Attributes:
        infos: in the order of their bytes.
        place: where its bytes lie in the buffer; it leaves the same remainder modulo ALIGNMENT as its place in the
            file, so that a tensor is aligned in memory if it is in the file.
    """

    infos: Sequence[TensorInfo]
    place: int

    @property
    def start(self) -> int:
        """Where it begins in its file."""
        return self.infos[0].start

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.infos[-1].end - self.start

    def slice_of(self, info: TensorInfo) -> slice:
        """Where one of the tensors lies in the buffer."""
        first = self.place + info.start - self.start
        return slice(first, first + info.end - info.start)

    def name_at(self, done: int, position: int) -> str:
        """The tensor that a byte of the range belongs to, by its position after the first `done`."""
        return next(info.name for info in self.infos if done + position < info.end - self.start)


def ranges(infos: Iterable[TensorInfo]) -> list[Range]:
    """Where the bytes of some tensors lie in their files and will lie in a buffer, in the order of both."""
    runs: list[list[TensorInfo]] = []
    for info in sorted(infos, key=lambda info: (info.file, info.start, info.end)):
        if runs and (runs[-1][-1].file, runs[-1][-1].end) == (info.file, info.start):
            runs[-1].append(info)
        else:
            runs.append([info])
    result: list[Range] = []
    for run in runs:
        free = result[-1].place + result[-1].size if result else 0
        result.append(Range(run, free + (run[0].start - free) % ALIGNMENT))
    return result


def bytes_needed(infos: Iterable[TensorInfo]) -> int:
    """The size of a buffer for these tensors."""
    found = ranges(infos)
    return found[-1].place + found[-1].size if found else 0


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
    names = (facts.embedding, facts.final_norm, *head)
    return [checkpoint.require(name, "a tensor outside the layers").name for name in names]


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
    named = [replace(info, name=name) for name, info in infos.items()]
    size = bytes_needed(named)
    if buffer is None or len(buffer) < size:
        buffer = torch.empty(size, dtype=torch.uint8)
    used = buffer[:size]
    stored: dict[str, torch.Tensor] = {}
    hashes: dict[str, str] = {}
    arriving = _arriving(ranges(named), used, stop or Event())
    with closing(thread_map(_hashed, arriving)) as found:  # while the next tensors are read
        for info, raw, digest in found:
            hashes[info.name] = digest
            stored[info.name] = as_tensor(info, raw)
    return LoadedTensors(
        checkpoint.folder, checkpoint.name, checkpoint.config, infos, checkpoint.revision, stored, hashes, used
    )


def _hashed(arrived: tuple[TensorInfo, torch.Tensor]) -> tuple[TensorInfo, torch.Tensor, str]:
    info, raw = arrived
    return info, raw, hashlib.sha256(as_bytes(raw)).hexdigest()


def _arriving(found: Sequence[Range], buffer: torch.Tensor, stop: Event) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """Read ranges to their places; each tensor's header entry and bytes as soon as these are there."""
    for one in found:
        file, whole, done = one.infos[0].file, buffer[one.place : one.place + one.size], 0
        for info in one.infos:
            while one.start + done < info.end:
                if stop.is_set():
                    return
                piece = whole[done : done + PIECE]
                read_into(file, one.start + done, as_bytes(piece), partial(one.name_at, done))
                done += len(piece)
            if stop.is_set():
                return
            yield info, buffer[one.slice_of(info)]


def tensors_in_memory(like: Checkpoint, tensors: Mapping[str, torch.Tensor], file: Path) -> LoadedTensors:
    """Tensors that are about to be written to `file`, as a reader of the finished checkpoint will find them.

    Args:
        like: gives folder, name and config.
        tensors: on the CPU, contiguous.
    """
    infos = {
        name: TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), file, 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    return LoadedTensors(like.folder, like.name, like.config, infos, like.revision, dict(tensors))
