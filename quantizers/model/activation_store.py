"""Activations of many sequences: on the device, in memory, or in one memory-mapped file.

The sequences are stored one after the other, each (T, width). In a file, the page cache holds the parts in use; the
process itself allocates no memory for them, and other processes can map the same file.

Each of several processes keeps a part of them, see row_partition.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import QuantizeError
from quantizers.system.files import atomic, disk_errors, sync_folder

from .row_partition import RowPartition


class ActivationStore:
    """(T_i, width) tensors by number; assigning an item writes to the memory or file that stores them.

    Args:
        path: the file; if it does not exist, it is created with all its blocks allocated. None for memory.
        lengths: T_i of each sequence, of all of them.
        width: number of columns.
        dtype: dtype of the elements.
        device: where they are if not in a file.
        dist: the processes that share them, of which each keeps a part.
        chunk: see `RowPartition`.

    Attributes:
        partition: which of the sequences are kept here.
        flat: (Σ T_i, width), all rows that are kept here.
    """

    def __init__(
        self,
        path: Path | None,
        lengths: Sequence[int],
        width: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        *,
        dist: ProcessGroup = SINGLE_PROCESS,
        chunk: int | None = None,
    ) -> None:
        self.path, self.width, self.partition = path, width, RowPartition(lengths, dist, chunk)
        kept = self.partition.kept_by(dist.rank)
        count = (kept.stop - kept.start) * width
        size = count * dtype.itemsize
        if path is None or not count:  # an empty file cannot be mapped
            self.flat = torch.empty(count, dtype=dtype, device=device).view(-1, width)
            return
        if not path.exists():
            # With all its blocks, so that a full disk is an error here instead of a SIGBUS in the middle of a layer.
            with disk_errors(path), atomic(path) as stream:
                os.posix_fallocate(stream.fileno(), 0, size)
        elif path.stat().st_size != size:
            raise QuantizeError(f"{path}: has {path.stat().st_size} bytes, not {size}; start over with --fresh")
        self.flat = torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(-1, width)

    def __len__(self) -> int:
        return len(self.partition.sequences)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        part, number = self.partition, self.partition.sequences[index]
        return self.flat[part.offsets[number] - part.start : part.offsets[number + 1] - part.start]

    def __setitem__(self, index: int, value: torch.Tensor) -> None:
        self[index].copy_(value)

    def batches(self) -> list[tuple[slice, list[int]]]:
        """`of_batch` of all batches that are kept here."""
        return [self.of_batch(batch) for batch in self.partition.batches if batch.start in self.partition.sequences]

    def of(self, sequence: int) -> torch.Tensor:
        """One of the sequences that are kept here, by its number among all."""
        return self[self.partition.sequences.index(sequence)]

    def of_batch(self, batch: range) -> tuple[slice, list[int]]:
        """The rows in `flat` of a batch that is kept here, and tokens of each of its sequences."""
        start, offsets = self.partition.start, self.partition.offsets
        rows = slice(offsets[batch.start] - start, offsets[batch.stop] - start)
        return rows, self.partition.lengths[batch.start : batch.stop]

    def remove(self) -> None:
        """Remove the file; its space is freed once no process maps it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Write a file's rows to disk before returning."""
        if self.path is None or not len(self.flat):
            return
        with disk_errors(self.path):
            with self.path.open("r+b") as stream:
                os.fsync(stream.fileno())  # on Linux this also writes back dirty shared mappings of the file
            sync_folder(self.path.parent)
