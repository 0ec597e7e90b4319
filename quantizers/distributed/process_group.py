"""The processes that share one run, and what they can do together; with one process all of it does nothing.

Work is dealt in units that do not depend on how many processes there are: sequences, blocks of rows, units of experts.
Every matmul keeps its shape, and sums over sequences or experts are added up in their order by whoever needs them.
Processes only pass on rows that one of them has computed; nothing is ever added up on the way. That is why the bytes
are those of one process.

All processes call the same methods in the same order. Whatever waits raises `QuantizeError` when a process is lost, and
`PeerFailed` when one has failed and printed why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")


class ProcessGroup:
    """The one process of a run that nobody else takes part in; the others are `distributed.Distributed`.

    Attributes:
        rank: which process this is, 0 to count - 1. Ranks are numbered machine by machine.
        count: how many there are.
        local: which of the processes of its machine this is, and so the number of its GPU.
        node: which machine this is, 0 to nodes - 1.
        nodes: how many machines there are.
    """

    rank: int = 0
    count: int = 1
    local: int = 0
    node: int = 0
    nodes: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that asks the user, reads the journal and keeps it."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.count > 1

    @property
    def name(self) -> str:
        """For messages: the rank, and the name of its machine."""
        return "this process"

    @property
    def here(self) -> ProcessGroup:
        """The processes of this machine."""
        return self

    @property
    def heads(self) -> ProcessGroup:
        """The first process of each machine; where this is none of them, it alone."""
        return self

    def ranks_of(self, node: int) -> range:
        """The processes of a machine."""
        return range(1)

    def share(self, items: int, rank: int | None = None) -> range:
        """A process's share of `items` items: consecutive ones, in the order of ranks.

        Args:
            rank: of the process; None for this one.
        """
        number = self.rank if rank is None else rank
        return range(items * number // self.count, items * (number + 1) // self.count)

    def connect(self, device: torch.device) -> None:
        """Make ready to pass on tensors, from and to this device; until then only objects can be passed on."""

    def heed(self, interrupt: Callable[[], None]) -> Callable[[], None]:
        """Let whatever waits for others call `interrupt`, which may raise.

        Returns:
            What to call between two steps of work: it also raises when another process has failed, or has not been
            heard of for too long. It is cheap.
        """
        return interrupt

    def barrier(self) -> None:
        """Wait until all have called this."""

    def in_turn(self, make: Callable[[], Made]) -> Made:
        """`make()`, by rank 0 first, then by the first process of each machine, then by the others.

        So what it creates or caches on a disk is there for those that come later.
        """
        return make()

    def tell(self, value: Any = None) -> Any:
        """What rank 0 calls this with: any object that can be pickled."""
        return value

    def collect(self, value: Any) -> list[Any]:
        """What each process calls this with, in the order of ranks."""
        return [value]

    def broadcast(self, tensor: torch.Tensor, owner: int = 0) -> None:
        """Overwrite a tensor with that of the owner, which has the same shape and dtype; contiguous, on any device."""

    def gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """The rows of all processes, concatenated in the order of ranks.

        Args:
            parts: this process's rows by name; a name that is missing here stands for no rows.
            device: where the result is wanted.

        Returns:
            The same in every process, with every name that any process has.
        """
        return dict(parts)

    def finish(self) -> None:
        """This process has done its part, and may end before the others."""

    def last_words(self, message: str, code: int) -> tuple[str | None, int]:
        """What a failing process prints, and its exit code: of several, only the first that failed prints why.

        Args:
            message, code: what it would print and end with if it were the only process.

        Returns:
            The message, None where another process prints it; and the code.
        """
        return message, code


SINGLE_PROCESS = ProcessGroup()
