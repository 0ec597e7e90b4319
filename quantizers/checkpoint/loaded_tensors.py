"""Parts of a checkpoint in memory, usually a decoder layer: read once, each tensor hashed as it arrives.

A part answers as the checkpoint itself does, but for its own tensors only, so nothing is read twice unnoticed. Each of
several processes reads all parts, on a machine mostly from the page cache, and compares their hashes with rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantizers.architectures.architecture import Architecture
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import CheckpointError
from quantizers.system.thread_map import thread_map

from .reader import Checkpoint, as_bytes, as_tensor, torch_dtype
from .safetensors_header import TORCH_DTYPES, TensorInfo

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes, of each tensor in a buffer


@dataclass(frozen=True)
class LoadedTensors(Checkpoint):
    """Some tensors of a checkpoint; `tensors` lists no others.

    Attributes:
        stored: every call of `tensor` returns the same memory, which must not be written to.
        hashes: SHA-256, hexadecimal, from when they were read; empty if they were not read from a file.
        buffer: the bytes uint8 (N,) of which they are views; None if each has memory of its own.
        origin: the checkpoint whose files they were read from, or that they were made of; None if that is elsewhere.
    """

    stored: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    buffer: torch.Tensor | None = field(default=None, repr=False, compare=False)
    origin: Checkpoint | None = field(default=None, repr=False, compare=False)

    @property
    def files(self) -> Checkpoint | None:
        """The checkpoint that reads from files, see `origin`."""
        return self.origin

    def raw(self, name: str) -> bytearray:
        """A copy of one tensor's bytes."""
        return bytearray(as_bytes(self.stored[name].cpu()))

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of one tensor, in one piece."""
        yield as_bytes(self.stored[name].cpu())

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, not to be changed."""
        return self.stored[name]

    def sha256(self, name: str) -> str:
        """The hash on arrival; that of the memory where the tensor did not arrive from a file."""
        return self.hashes.get(name) or super().sha256(name)

    def digest(self) -> str:
        """SHA-256, hexadecimal, over all names and hashes."""
        lines = "".join(f"{name}\0{self.sha256(name)}\n" for name in sorted(self.tensors))
        return hashlib.sha256(lines.encode()).hexdigest()

    def only(self, names: Collection[str]) -> LoadedTensors:
        """These tensors alone, copied out of the buffer, so that the memory of the others can be freed."""
        return replace(
            self,
            tensors={name: self.tensors[name] for name in names},
            stored={name: self.stored[name] if self.buffer is None else self.stored[name].clone() for name in names},
            hashes={name: self.hashes[name] for name in names if name in self.hashes},
            buffer=None,
        )

    def to(self, device: torch.device, prefetched: torch.Tensor | None = None) -> LoadedTensors:
        """The same part on a device, its buffer copied as a whole unless that is `prefetched`; itself on a CPU."""
        if device.type == "cpu" and prefetched is None:
            return self
        if self.buffer is None:
            return replace(self, stored={name: tensor.to(device) for name, tensor in self.stored.items()})
        moved, stored = self.buffer.to(device) if prefetched is None else prefetched, {}
        for name, tensor in self.stored.items():
            info = self.tensors[name]
            start = (tensor.storage_offset() - info.before) * tensor.element_size()
            stored[name] = as_tensor(info, moved[start : start + info.size])
        return replace(self, stored=stored, buffer=moved)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the part's buffer, which gets other bytes when the part is emptied."""
        storage = None if self.buffer is None else self.buffer.untyped_storage().data_ptr()
        return tensor.untyped_storage().data_ptr() == storage


def bytes_needed(infos: Iterable[TensorInfo]) -> int:
    """The size of a buffer for these tensors; what several have together is in it once."""
    return sum(_aligned(end - start) for _, start, end in {_range(info) for info in infos})


def _range(info: TensorInfo) -> tuple[Path, int, int]:
    return info.file, info.start, info.end


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def layer_names(checkpoint: Checkpoint, facts: Architecture, number: int) -> list[str]:
    """The names of a layer's tensors in a checkpoint, without those of its tables, of which rows are looked up."""
    prefix = facts.layer(number, "")
    return [name for name in checkpoint.tensors if name.startswith(prefix) and name not in facts.table_parts]


def with_tables(checkpoint: Checkpoint, facts: Architecture, layers: Mapping[int, Sequence[str]]) -> list[list[str]]:
    """Names that a pass over these names of each layer needs of the files: behind a layer's, those of its tables."""
    needed: list[list[str]] = []
    for number, names in layers.items():
        needed.append([*names])
        if tables := [name for name in facts.in_tables(number) if name in checkpoint.tensors]:
            needed.append(tables)
    return needed


def outside_names(checkpoint: Checkpoint, facts: Architecture) -> list[str]:
    """The names of what a model needs outside its layers, the head in whichever format; none may be missing."""
    module = facts.head.removesuffix(".weight")
    head = [name for name in checkpoint.tensors if name.rpartition(".")[0] == module] or [facts.head]
    others = [name for name in facts.outside if name != facts.head]
    return [checkpoint.require(name, "a tensor outside the layers").name for name in (*others, *head)]


def load_tensors(
    checkpoint: Checkpoint, names: Iterable[str], stop: Event | None = None, buffer: torch.Tensor | None = None
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
    wanted = sorted({_range(info): info for info in infos.values()}.values(), key=_range)
    starts = accumulate((_aligned(info.size) for info in wanted), initial=0)
    places = [(info, buffer[start : start + info.size]) for info, start in zip(wanted, starts, strict=False)]
    bytes_of = {_range(info): raw for info, raw in places}
    asked = ((info, as_bytes(raw)) for info, raw in places if not (stop and stop.is_set()))
    reading = checkpoint.read_into(asked, stop)
    arriving = (as_bytes(raw) for _, (_, raw) in zip(reading, places, strict=False))
    with closing(thread_map(hashlib.sha256, arriving)) as digests:  # while the next tensors are read
        hashed = {_range(info): digest.hexdigest() for digest, info in zip(digests, wanted, strict=False)}
    hashes = {name: hashed[_range(info)] for name, info in infos.items() if _range(info) in hashed}
    stored = {name: as_tensor(info, bytes_of[_range(info)]) for name, info in infos.items()}
    own = (checkpoint.folder, checkpoint.name, checkpoint.config, infos, checkpoint.revision)
    return LoadedTensors(*own, stored, hashes, buffer[:size], checkpoint.files)


def load_once(checkpoint: Checkpoint, names: Sequence[str], dist: ProcessGroup) -> LoadedTensors:
    """`load_tensors` of a part that all processes read, once in this pass."""
    loaded = load_tensors(checkpoint, names)
    dist.barrier()
    checkpoint.release(names)
    return loaded


def tensors_in_memory(like: Checkpoint, tensors: Mapping[str, torch.Tensor], file: Path) -> LoadedTensors:
    """Contiguous tensors that will be in `file`, as a reader finds them; `like` gives folder, name and config."""
    spelled = {f"torch.{name}": dtype for dtype, name in TORCH_DTYPES.items()}
    infos = {
        name: TensorInfo(name, spelled[str(tensor.dtype)], tuple(tensor.shape), file, 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    own = (like.folder, like.name, like.config, infos, like.revision)
    return LoadedTensors(*own, dict(tensors), origin=like.files)


def prefetched_tensors(
    checkpoint: Checkpoint,
    parts: Sequence[Sequence[str]],
    dist: ProcessGroup = SINGLE_PROCESS,
    prepare: Callable[[torch.Tensor], object] = lambda _: None,
    arrived: Callable[[LoadedTensors], object] = lambda _: None,
) -> Generator[LoadedTensors]:
    """Each part in its turn, while a thread reads the one after it. Close the iterator to stop the thread early.

    Two buffers alternate: fresh memory for a layer of 3.6 GB would cost a page fault for each 4 KiB, a million a layer.
    So a part is emptied when the next one is asked for.

    Args:
        dist: the processes that ask for the same parts; each has the checkpoint on its machine.
        prepare: called with each of the two buffers, once, before anything is read.
        arrived: called by the thread with each part as it has been read.

    Raises:
        CheckpointError: as `load_tensors`, when the part's turn comes; or this process read other bytes than rank 0.
    """
    import torch

    size = max((bytes_needed(checkpoint.tensors[name] for name in names) for names in parts), default=0)
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in parts[:2]]
    for buffer in buffers:
        prepare(buffer)
    stop = Event()
    with ThreadPoolExecutor(max_workers=1) as pool:

        def read(position: int) -> LoadedTensors:
            loaded = load_tensors(checkpoint, parts[position], stop, buffers[position % 2])
            if not stop.is_set():
                arrived(loaded)
            return loaded

        def begin(position: int) -> list[Future[LoadedTensors]]:
            return [pool.submit(read, position)] if position < len(parts) else []

        try:
            reading = begin(0)
            for position in range(len(parts)):
                loaded = reading.pop().result()
                reading = begin(position + 1)  # the part before this one is in use no more
                first = dist.broadcast_object(loaded.hashes)
                for name, digest in loaded.hashes.items():
                    if first[name] != digest:
                        raise CheckpointError(
                            f"{dist.name}: {loaded.tensors[name].file}",
                            f"{name} has other bytes than on the machine of rank 0",
                            "copy the source there again",
                        )
                dist.barrier()  # rank 0 passes a broadcast before the others have read
                checkpoint.release(parts[position])
                yield loaded
                loaded.stored.clear()  # their memory gets other bytes; names, hashes and the digest stay
        finally:
            stop.set()


def broadcast_tensors(loaded: LoadedTensors | None, dist: ProcessGroup) -> LoadedTensors:
    """Rank 0's part in every process; the others, which call this with None, get it in memory of their own.

    Of files that only rank 0 has, nothing more can be read.
    """
    import torch

    received: LoadedTensors = dist.broadcast_object(loaded and replace(loaded, stored={}, buffer=None, origin=None))
    if loaded is None:
        empty = {
            name: torch.empty(info.shape, dtype=torch_dtype(info.dtype)) for name, info in received.tensors.items()
        }
        loaded = replace(received, stored=empty)
    for name in received.tensors:
        dist.broadcast(loaded.stored[name])
    return replace(loaded, origin=None)
