"""The sequences that go through the layers while a budget is measured: where they lie, and whose they are.

They lie one after the other:

    the calibration sequences | the probes | the branch of the first layer with experts | that of the second | …

*Probes* are the beginnings of some of the sequences, as the source has them, in the shapes in which they branch off. A
*branch* has all of them, disturbed; and behind them every HALF_EVERY-th once more, disturbed half as much. Branch
number 0 is the probes themselves.

Several processes deal out sequences and probes. A probe's branches belong to whoever has the probe, so what is compared
with it is computed beside it. Each process has all states in a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from quantizers.distributed.process_group import ProcessGroup
from quantizers.forward.states import Rows

BRANCH_TOKENS, BRANCH_LENGTH = 8192, 512  # tokens of a branch, and of one of its sequences, at most
HALF_EVERY = 4  # every fourth sequence of a branch is also run with half the error


@dataclass(frozen=True)
class Branches:
    """Where everything lies.

    Attributes:
        lengths: tokens of each calibration sequence.
    """

    lengths: Sequence[int]

    @cached_property
    def probes(self) -> list[int]:
        """The sequences whose beginnings branch off: evenly spread, about BRANCH_TOKENS tokens in all."""
        total = sum(min(length, BRANCH_LENGTH) for length in self.lengths)
        step = max(1, round(total / BRANCH_TOKENS))
        return list(range(0, len(self.lengths), step))

    @cached_property
    def halved(self) -> range:
        """The probes, by their number among them, that also go on with half of the disturbance."""
        return range(0, len(self.probes), HALF_EVERY)

    @cached_property
    def probe_lengths(self) -> list[int]:
        """Tokens of each probe."""
        return [min(self.lengths[i], BRANCH_LENGTH) for i in self.probes]

    def all_lengths(self, branches: int) -> list[int]:
        """Tokens of everything, with the branches of so many layers."""
        branch = [*self.probe_lengths, *(self.probe_lengths[k] for k in self.halved)]
        return [*self.lengths, *self.probe_lengths, *branch * branches]

    def place(self, branch: int, number: int) -> int:
        """Where a branch's n-th sequence lies, halves last."""
        halves_before = len(self.halved) * max(branch - 1, 0)
        return len(self.lengths) + branch * len(self.probes) + halves_before + number

    def number_of_half(self, probe: int) -> int:
        """Which sequence of a branch the half of a probe is, one that is halved."""
        return len(self.probes) + self.halved.index(probe)

    def runs(self, sequences: range, probes: range, branches: int) -> Iterator[range]:
        """All that belongs to some sequences and probes: places that follow each other.

        Args:
            branches: the number of layers that have one.
        """
        yield sequences
        first, last = (-(-k // HALF_EVERY) for k in (probes.start, probes.stop))
        for branch in range(branches + 1):
            yield range(self.place(branch, probes.start), self.place(branch, probes.stop))
            if branch:
                yield range(*(self.place(branch, len(self.probes) + half) for half in (first, last)))

    def parts(self, values: Mapping[int, float], sizes: Mapping[int, float]) -> dict[str, float]:
        """Σ values / Σ sizes of a branch's sequences: of `all`, of `some` also run with half the error, and `half`."""
        whole = len(self.probes)
        parts = {"all": range(whole), "some": self.halved, "half": range(whole, whole + len(self.halved))}
        totals = {name: (sum(values[n] for n in part), sum(sizes[n] for n in part)) for name, part in parts.items()}
        return {name: value / size if size > 0 else 0.0 for name, (value, size) in totals.items()}


def pass_on(rows: Rows, layout: Branches, branches: int, dist: ProcessGroup) -> None:
    """Get the rows that the other processes have computed.

    Args:
        rows: of everything, with the branches of so many layers.
    """
    offsets = rows.share.offsets
    for rank in range(dist.world_size):
        sequences, probes = (dist.partition(len(items), rank) for items in (layout.lengths, layout.probes))
        for run in layout.runs(sequences, probes, branches):
            dist.broadcast(rows.flat[offsets[run.start] : offsets[run.stop]], rank)
