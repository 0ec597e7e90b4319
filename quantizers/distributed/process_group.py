"""The process group of a run. This file has the group of one process; torch_group.py has that of several.

Output bytes do not depend on the number of processes: work is split into expert batches, sequences and token chunks
that do not depend on it either, every matmul keeps its shape, and each process that needs a sum over sequences or
experts adds it in their order. Results are broadcast or gathered, never reduced.

All processes call the same methods in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from quantizers.system.errors import QuantizeError
from quantizers.system.progress import Step, progress

if TYPE_CHECKING:
    import torch

Made = TypeVar("Made")
RESUME = "give the same command again to resume"


def launched() -> tuple[int, int, int] | None:
    """Rank, world size and local rank, from a launcher's environment; None for a process by itself."""
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(value.isdigit() for value in values) or int(values[1]) < 2:
        return None
    rank, world_size, local_rank = map(int, values)
    return rank, world_size, local_rank


class ProcessGroup:
    """The group of a single process: every method returns at once."""

    rank: int = 0  # ranks are numbered machine by machine
    world_size: int = 1
    local_rank: int = 0  # on this machine; the index of the GPU
    nodes: Sequence[int] = (0,)  # of each rank the number of its machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which asks the user, and reads and writes the journal."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1

    @property
    def node(self) -> int:
        """Number of this process's machine, 0 for that of rank 0."""
        return self.nodes[self.rank]

    @property
    def local_world_size(self) -> int:
        """Number of processes on this machine."""
        return self.nodes.count(self.node)

    @property
    def name(self) -> str:
        """Rank and host name, for messages."""
        return "this process"

    def partition(self, items: int, rank: int | None = None) -> range:
        """The consecutive ones of `items` items that a rank (None: this process) works on."""
        rank = self.rank if rank is None else rank
        return range(items * rank // self.world_size, items * (rank + 1) // self.world_size)

    def connect(self, device: torch.device) -> None:
        """Set the device through which tensors are exchanged: NCCL for a GPU, gloo for the CPU."""

    def watch(self, interrupt: Callable[[], None]) -> Callable[[], None]:
        """Call `interrupt`, which may raise, while waiting for other processes. Returns it."""
        return interrupt

    def barrier(self) -> None:
        """Wait until all processes have called this."""

    def in_turn(self, make: Callable[[], Made]) -> Made:
        """`make()`, by rank 0 first, then by local rank 0 of each machine, then by the others: for cached results."""
        return make()

    def broadcast_object(self, value: Any = None, src: int = 0) -> Any:
        """The picklable object that rank `src` calls this with."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """The objects that the processes call this with, in the order of ranks."""
        return [value]

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        """Overwrite a contiguous tensor of any device with that of rank `src`, which has the same shape and dtype."""

    def all_gather(self, parts: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """The rows of all processes, concatenated in the order of ranks, on `device`: the same in every process.

        Args:
            parts: this process's rows (N, …) by name; a missing name stands for no rows.
        """
        return dict(parts)

    def shutdown(self) -> None:
        """Leave the group after the last exchange; the other processes may still be at work."""

    def first_failure(self, error: QuantizeError) -> tuple[QuantizeError, bool]:
        """Return the first failure of all processes, which ended the run, and whether this process prints its text.

        Args:
            error: this process's own failure.
        """
        return error, True


SINGLE_PROCESS = ProcessGroup()


def rank_0_progress(
    title: str, total: int, done: int, check: Callable[[], None], dist: ProcessGroup, *, unit: str = ""
) -> AbstractContextManager[Step]:
    """`progress` on rank 0; on the others it only calls `check`."""
    return progress(title, total, done, unit, check=check, silent=not dist.is_main)
