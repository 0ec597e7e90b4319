"""From a launcher's environment to the process group of a run:

    torchrun --nproc-per-node 4 -m quantizers run RECIPE
    accelerate launch --num_processes 4 -m quantizers run RECIPE

On several machines each runs the same command, with what the launcher needs to find the first machine.
"""

from __future__ import annotations

import os

from .process_group import ProcessGroup


def launched() -> tuple[int, int, int] | None:
    """Rank, world size and local rank, from a launcher's environment; None for a process by itself."""
    words = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(word.isdigit() for word in words) or int(words[1]) < 2:
        return None
    rank, world_size, local_rank = map(int, words)
    return rank, world_size, local_rank


def join_launched() -> ProcessGroup:
    """The group of the processes that a launcher started; that of this process alone without one.

    Raises:
        InputError, QuantizeError: see `init_process_group`.
    """
    found = launched()
    if found is None:
        return ProcessGroup()
    from .torch_group import init_process_group  # imports torch, which takes seconds

    return init_process_group(*found)
