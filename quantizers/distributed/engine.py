"""torch's process groups, made by accelerate: the engine that passes tensors on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store

LONGEST = timedelta(days=7)  # a collective may wait for a layer; heart.py notices who is lost


def process_groups(
    store: Store, device: torch.device, heads: Sequence[int], rank: int, count: int
) -> tuple[ProcessGroup, torch.device, ProcessGroup | None]:
    """The group of all processes, the device on which it wants tensors, and the group of some of them.

    Args:
        store: of all processes of this attempt: a launcher's own still has what an attempt before this one wrote.
        device: of this process.
        heads: the ranks that get a group of their own, where these are more than one and not all.
        rank, count: of this process, and how many there are.
    """
    import torch
    import torch.distributed as torch_distributed
    from accelerate import PartialState

    # Otherwise NCCL's own watchdog ends a process with SIGABRT and a page of text before heart.py has said who is lost.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU it sets threads of its own choice, and says so
        PartialState(cpu=device.type == "cpu", timeout=LONGEST, store=store, rank=rank, world_size=count)
    torch.set_num_threads(threads)
    everyone = torch_distributed.group.WORLD
    assert everyone is not None
    if device.type == "cuda":
        torch.cuda.set_device(device)  # --device may have named another one than accelerate chooses
    of_heads = everyone if len(heads) == torch_distributed.get_world_size() else None
    if of_heads is None and len(heads) > 1:
        made = torch_distributed.new_group(list(heads), timeout=LONGEST)  # all take part in this
        of_heads = made if rank in heads else None
    return everyone, device if torch_distributed.get_backend() == "nccl" else torch.device("cpu"), of_heads


def close() -> None:
    """Give the groups back, which otherwise warn when the process ends."""
    from accelerate import PartialState

    PartialState().destroy_process_group()
