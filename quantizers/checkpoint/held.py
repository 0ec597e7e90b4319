"""Parts of a checkpoint in memory: read once, each tensor hashed as it arrives, one part ahead of their use.

A part is whatever is used together, usually a decoder layer. While one part is in use, a thread reads the next,
so at most two are in memory. A part answers as the checkpoint itself does, but for its own tensors only: reading
any other is an error, so nothing can be read from a file a second time unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantizers.architectures.architecture import Architecture

from .reader import Checkpoint
from .safetensors_header import TensorInfo
from .tensor_bytes import as_bytes, as_tensor, dtype_name, read_bytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Held(Checkpoint):
    """Some tensors of a checkpoint; `tensors` lists no others.

    Attributes:
        stored: the tensors on the CPU, contiguous. Every call of `tensor` returns the same memory, so nobody may
            write into it.
        hashes: their SHA-256, hexadecimal, taken when they were read; empty if they were not read from a file.
    """

    stored: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)

    def raw(self, name: str) -> bytearray:
        """A copy of one tensor's bytes."""
        return bytearray(as_bytes(self.stored[name]))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, not to be changed."""
        return self.stored[name]

    def sha256(self, name: str) -> str:
        """The hash on arrival; that of the memory where the tensor did not arrive from a file."""
        return self.hashes[name] if name in self.hashes else hashlib.sha256(as_bytes(self.stored[name])).hexdigest()

    def digest(self) -> str:
        """SHA-256, hexadecimal, over all names and hashes."""
        lines = "".join(f"{name}\0{self.sha256(name)}\n" for name in sorted(self.stored))
        return hashlib.sha256(lines.encode()).hexdigest()

    def only(self, names: Iterable[str]) -> Held:
        """The same with these tensors alone, so that the memory of the others can be freed."""
        kept = list(names)
        return replace(
            self,
            tensors={name: self.tensors[name] for name in kept},
            stored={name: self.stored[name] for name in kept},
            hashes={name: self.hashes[name] for name in kept if name in self.hashes},
        )


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


def hold(checkpoint: Checkpoint, names: Iterable[str], stop: Event | None = None) -> Held:
    """Read some tensors into memory, in the order of their bytes.

    Args:
        stop: reading ends early once this is set; what is returned then is of no use.

    Raises:
        CheckpointError: a file is gone or has shrunk since its header was read, or a dtype is unknown.
    """
    infos = {name: checkpoint.tensors[name] for name in names}
    stored: dict[str, torch.Tensor] = {}
    hashes: dict[str, str] = {}
    for name, info in sorted(infos.items(), key=lambda item: (item[1].file, item[1].start)):
        if stop is not None and stop.is_set():
            break
        raw = read_bytes(info)
        hashes[name] = hashlib.sha256(raw).hexdigest()
        stored[name] = as_tensor(info, raw)
    return Held(checkpoint.folder, checkpoint.name, checkpoint.config, infos, checkpoint.revision, stored, hashes)


def held_tensors(like: Checkpoint, tensors: Mapping[str, torch.Tensor], file: Path) -> Held:
    """Tensors that are about to be written to `file`, as a reader of the finished checkpoint will find them.

    Args:
        like: gives folder, name and config.
        tensors: on the CPU, contiguous.
    """
    infos = {
        name: TensorInfo(name, dtype_name(tensor.dtype), tuple(tensor.shape), file, 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    return Held(like.folder, like.name, like.config, infos, like.revision, tensors)


def held_ahead(checkpoint: Checkpoint, parts: Sequence[Sequence[str]]) -> Generator[Held]:
    """Each part in its turn, while a thread reads the one after it. Close the iterator to stop the thread early.

    Args:
        parts: the names of each part's tensors.

    Raises:
        CheckpointError: as `hold`, when the part's turn comes.
    """
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            reading = [pool.submit(hold, checkpoint, names, stop) for names in parts[:1]]
            for position in range(len(parts)):
                held = reading.pop().result()
                reading += [pool.submit(hold, checkpoint, names, stop) for names in parts[position + 1 : position + 2]]
                yield held
                del held  # only the one that is being read may be in memory besides the next that is asked for
        finally:
            stop.set()
