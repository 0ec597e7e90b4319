"""Activations of many sequences, one after the other: on the device, in memory, or in one memory-mapped file.

Of several processes each computes some of the rows, in whole chunks, consecutive ones in the order of ranks. Attention
needs whole batches of sequences: where one reaches across the border of two ranks' rows, both keep all of it and take
it through attention, which gives both the same bits. What follows is computed by the chunk's process alone, and
afterwards the rows of these batches are exchanged (`complete`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import QuantizeError
from quantizers.system.files import atomic, disk_errors, sync_folder

MOST_PADDING = 1 / 4  # of the rows of a batch


class ActivationStore:
    """The sequences (T_i, width) that this process keeps, by their numbers; an assignment copies into the store.

    Args:
        path: the file; if it does not exist, it is created with all its blocks allocated. None for memory.
        lengths: T_i of each sequence, of all of them.
        device: where they are if not in a file.
        chunk: rows that go through a layer together, see planning/expert_batches.py; None: one chunk of all.

    Attributes:
        offsets: where each sequence begins among all rows, and where the last one ends.
        batches: the sequences that go through attention together, of all of them.
        rows: first and last (exclusive) row that this process computes, among all.
        sequences: those that it keeps: of each batch that has a row among these.
        start: the first row that it keeps, among all.
        flat: (N, width), all rows that it keeps.
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
        self.path = path
        self.lengths = list(lengths)
        self.width = width
        self.dist = dist
        self._chunk = chunk or max(1, sum(lengths))
        self.offsets = [0, *accumulate(lengths)]
        self.batches = batches(lengths, self._chunk)
        self.rows = first, last = self.rows_of(dist.rank)
        kept = [b for b in self.batches if self.offsets[b.start] < last and first < self.offsets[b.stop]]
        self.sequences = range(kept[0].start, kept[-1].stop) if first < last else range(0)
        self.start = self.offsets[self.sequences.start]
        count = (self.offsets[self.sequences.stop] - self.start) * width
        size = count * dtype.itemsize
        if path is None or not count:  # an empty file cannot be mapped
            self.flat = torch.empty(count, dtype=dtype, device=device).view(-1, width)
            return
        if not path.exists():
            # With all its blocks, so that a full disk is an error here instead of a SIGBUS in the middle of a layer.
            with disk_errors(path), atomic(path) as stream:
                os.posix_fallocate(stream.fileno(), 0, size)
        elif path.stat().st_size != size:
            raise QuantizeError(
                path, f"has {path.stat().st_size} bytes, not {size}", "start over with --fresh, or in another --work"
            )
        self.flat = torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(-1, width)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, sequence: int) -> torch.Tensor:
        if sequence not in self.sequences:
            raise IndexError(sequence)
        return self.flat[self.of_batch(range(sequence, sequence + 1))[0]]

    def __setitem__(self, sequence: int, value: torch.Tensor) -> None:
        self[sequence].copy_(value)

    def of_batch(self, batch: range) -> tuple[slice, list[int]]:
        """The rows in `flat` of a batch that is kept here, and tokens of each of its sequences."""
        rows = slice(self.offsets[batch.start] - self.start, self.offsets[batch.stop] - self.start)
        return rows, self.lengths[batch.start : batch.stop]

    @property
    def owned_batches(self) -> list[range]:
        """The batches whose first row this process computes: each is one process's."""
        first, last = self.rows
        return [batch for batch in self.batches if first <= self.offsets[batch.start] < last]

    @property
    def owned(self) -> range:
        """Sequences of `owned_batches`."""
        owned = self.owned_batches
        return range(owned[0].start, owned[-1].stop) if owned else range(0)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """First and last (exclusive) row that a process computes chunk by chunk, among all."""
        total = self.offsets[-1]
        chunks = self.dist.partition(-(-total // self._chunk), rank)
        return min(chunks.start * self._chunk, total), min(chunks.stop * self._chunk, total)

    def chunks(self) -> list[slice]:
        """Rows in `flat`: the chunks that this process computes, the same for any number of processes."""
        first, last = self.rows
        starts = range(first, last, self._chunk)
        return [slice(start - self.start, min(start + self._chunk, last) - self.start) for start in starts]

    def complete(self) -> None:
        """Get the rows at the borders that others have computed."""
        shares = [self.rows_of(rank) for rank in range(self.dist.world_size)]
        for batch in self.batches:  # in all processes the same ones are exchanged
            first, last = self.offsets[batch.start], self.offsets[batch.stop]
            if not any(first < border < last for _, border in shares[:-1]):
                continue
            for owner, share in enumerate(shares):
                begin, end = max(share[0], first), min(share[1], last)
                if begin < end:
                    self.dist.broadcast(self._among_all(begin, end), owner)

    def collect(self, whole: torch.Tensor | None) -> None:
        """Put together in rank 0's `whole`, (all rows, width) on the CPU, what the processes have computed."""
        if whole is not None:
            whole[slice(*self.rows)].copy_(self._among_all(*self.rows))
        for owner in range(self.dist.world_size):
            first, last = self.rows_of(owner)
            self.dist.broadcast(self._among_all(first, last) if whole is None else whole[first:last], owner)

    def deal(self, whole: torch.Tensor | None) -> None:
        """Fill the stores of all processes from rank 0's `whole`: the reverse of `collect`."""
        for rank in range(self.dist.world_size):
            first, last = self.rows_of(rank)
            rows = self._among_all(first, last) if whole is None else whole[first:last]
            self.dist.broadcast(rows)
            begin, end = max(first, self.start), min(last, self.start + len(self.flat))
            if begin < end:
                self._among_all(begin, end).copy_(rows[begin - first : end - first])

    def _among_all(self, first: int, last: int) -> torch.Tensor:
        """Rows by their numbers among all; if not all are kept here, a buffer, as a broadcast needs all processes."""
        begin, end = first - self.start, last - self.start
        kept = begin >= 0 and end <= len(self.flat)
        return self.flat[begin:end] if kept else self.flat.new_empty(last - first, self.width)

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


def batches(lengths: Sequence[int], most: int) -> list[range]:
    """Consecutive sequences that go through attention together, since a short one alone would give it few tokens.

    A batch has at most `most` rows with its padding, or is one longer sequence. What is computed together follows from
    the lengths alone.
    """
    result: list[range] = []
    first = tokens = longest = 0
    for number, length in enumerate(lengths):
        tokens, longest = tokens + length, max(longest, length)
        rows = longest * (number + 1 - first)
        if number > first and (rows > most or rows - tokens > MOST_PADDING * rows):
            result.append(range(first, number))
            first = number
            tokens = length
            longest = length
    return [*result, range(first, len(lengths))] if lengths else []
