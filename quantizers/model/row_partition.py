"""Partition of the rows of many sequences: which a process computes, and which it keeps.

Rows are dealt in whole chunks (see `RowPartition.chunks`), consecutive ones in the order of ranks. Attention needs
whole batches of sequences (see `batches`), and a batch may reach across the border of two ranks' rows: then
both keep all of it, and take it through attention both, which gives both the same bits. What follows attention is
computed chunk by chunk, by the chunk's process alone; afterwards the rows of the batches at the borders are exchanged
(`RowPartition.complete`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup

MOST_PADDING = 1 / 4  # of the rows of a batch


class RowPartition:
    """One process's part of the rows of some sequences.

    Args:
        lengths: tokens of each sequence, of all of them.
        dist: who shares them.
        chunk: rows that go through a layer together, see planning/expert_batches.py; None: one chunk of all.

    Attributes:
        offsets: where each sequence begins among all rows, and where the last one ends.
        batches: the sequences that go through attention together, of all of them.
        rows: first and last (exclusive) row of those that this process computes chunk by chunk.
        sequences: those that it keeps: of each batch that has a row among these.
        start: the first row that it keeps.
    """

    def __init__(self, lengths: Sequence[int], dist: ProcessGroup = SINGLE_PROCESS, chunk: int | None = None) -> None:
        self.lengths, self.dist = list(lengths), dist
        self._chunk = chunk or max(1, sum(lengths))
        self.offsets = [0]
        for length in lengths:
            self.offsets.append(self.offsets[-1] + length)
        self.batches = batches(self.lengths, self._chunk)
        self.rows = self.rows_of(dist.rank)
        self.sequences = self._touching(self.rows)
        self.start = self.offsets[self.sequences.start]

    @property
    def owned_batches(self) -> list[range]:
        """The batches whose first row this process computes: each is one process's."""
        first, last = self.rows
        return [batch for batch in self.batches if first <= self.offsets[batch.start] < last]

    @property
    def owned(self) -> range:
        """Their sequences."""
        batches = self.owned_batches
        return range(batches[0].start, batches[-1].stop) if batches else range(0)

    def rows_of(self, rank: int) -> tuple[int, int]:
        """First and last (exclusive) row that a process computes chunk by chunk."""
        total = self.offsets[-1]
        chunks = self.dist.partition(-(-total // self._chunk), rank)
        return min(chunks.start * self._chunk, total), min(chunks.stop * self._chunk, total)

    def kept_by(self, rank: int) -> slice:
        """The rows that a process keeps, counted through all sequences."""
        kept = self._touching(self.rows_of(rank))
        return slice(self.offsets[kept.start], self.offsets[kept.stop])

    def chunks(self) -> list[slice]:
        """Slices of the rows kept here: the chunks that this process computes, the same for any number of processes."""
        first, last = self.rows
        starts = range(first, last, self._chunk)
        return [slice(start - self.start, min(start + self._chunk, last) - self.start) for start in starts]

    def complete(self, flat: torch.Tensor) -> None:
        """Get the rows at the borders that others have computed.

        Args:
            flat: (rows kept, …), of which this process has computed its chunks.
        """
        kept = self.kept_by(self.dist.rank)
        for first, last in self._borders():
            here = kept.start <= first and last <= kept.stop
            for owner in range(self.dist.world_size):
                begin, end = self.rows_of(owner)
                begin, end = max(begin, first), min(end, last)
                if begin < end:
                    rows = flat[begin - self.start : end - self.start] if here else _unused(flat, end - begin)
                    self.dist.broadcast(rows, owner)

    def collect(self, flat: torch.Tensor, whole: torch.Tensor | None) -> None:
        """Put together in rank 0 what the processes have computed.

        Args:
            flat: (rows kept, …), of this process.
            whole: (all rows, …) on the CPU, filled here; None in the other ranks.
        """
        computed = flat[self.rows[0] - self.start : self.rows[1] - self.start]
        if whole is not None:
            whole[slice(*self.rows)].copy_(computed)
        for owner in range(self.dist.world_size):
            first, last = self.rows_of(owner)
            if whole is not None:
                rows = whole[first:last]
            else:
                rows = computed if owner == self.dist.rank else _unused(flat, last - first)
            self.dist.broadcast(rows, owner)

    def deal(self, flat: torch.Tensor, whole: torch.Tensor | None) -> None:
        """Give each process the rows that it keeps; the reverse of `collect`.

        Args:
            flat: (rows kept, …), filled here.
            whole: (all rows, …) in rank 0; None in the others.
        """
        kept = self.kept_by(self.dist.rank)
        for rank in range(self.dist.world_size):
            first, last = self.rows_of(rank)
            rows = _unused(flat, last - first) if whole is None else whole[first:last]
            self.dist.broadcast(rows)
            begin, end = max(first, kept.start), min(last, kept.stop)
            if begin < end:
                flat[begin - self.start : end - self.start].copy_(rows[begin - first : end - first])

    def _borders(self) -> list[tuple[int, int]]:
        """First and last (exclusive) rows of the batches that reach across a border; the same in all processes."""
        ends = {self.rows_of(rank)[1] for rank in range(self.dist.world_size - 1)}
        spans = [(self.offsets[batch.start], self.offsets[batch.stop]) for batch in self.batches]
        return [(begin, end) for begin, end in spans if any(begin < border < end for border in ends)]

    def _touching(self, rows: tuple[int, int]) -> range:
        """The sequences of the batches that have a row among these."""
        first, last = rows
        touched = [b for b in self.batches if self.offsets[b.start] < last and first < self.offsets[b.stop]]
        return range(touched[0].start, touched[-1].stop) if first < last else range(0)


def _unused(like: torch.Tensor, rows: int) -> torch.Tensor:
    """A buffer for rows that this process does not keep: a broadcast needs all processes."""
    return like.new_empty(rows, *like.shape[1:])


def batches(lengths: Sequence[int], most: int) -> list[range]:
    """Consecutive sequences that go through attention together, since a short one alone would give it few tokens.

    A batch has at most `most` rows with its padding, or is one longer sequence. What is computed together follows from
    the lengths alone.

    Args:
        lengths: tokens of each sequence.
        most: rows of a batch of more than one sequence.
    """
    result: list[range] = []
    first = tokens = longest = 0
    for number, length in enumerate(lengths):
        tokens, longest = tokens + length, max(longest, length)
        rows = longest * (number + 1 - first)
        if number > first and (rows > most or rows - tokens > MOST_PADDING * rows):
            result.append(range(first, number))
            first, tokens, longest = number, length, length
    return [*result, range(first, len(lengths))] if lengths else []
