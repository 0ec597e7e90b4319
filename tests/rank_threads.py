"""Ranks that are threads of one process: the store, the heart and gloo are real, launchers and machines are not."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar
from unittest.mock import patch

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from quantizers.distributed.launch import Distributed, meet

Result = TypeVar("Result")
LONG = timedelta(minutes=10)


def joined(store: HashStore, rank: int, count: int, nodes: int = 1) -> Distributed:
    """One of `count` ranks, evenly on so many machines, ready to pass on tensors."""
    each = count // nodes
    dist = meet(store, rank, count, rank % each, f"host{rank // each}")
    group = ProcessGroupGloo(PrefixStore("group", store), rank, count, LONG)
    heads = None
    if nodes > 1 and rank % each == 0:
        heads = ProcessGroupGloo(PrefixStore("heads", store), rank // each, nodes, LONG)
    dist.join(group, torch.device("cpu"), heads)
    return dist


def together(
    count: int, work: Callable[[Distributed], Result], nodes: int = 1, store: HashStore | None = None
) -> list[Result | Exception]:
    """`work` by `count` ranks: what each returned or raised. Whoever raises says so to the others, as main() does."""
    store = store or HashStore()

    def one(rank: int) -> Result | Exception:
        dist = joined(store, rank, count, nodes)
        try:
            result = work(dist)
            dist.barrier()  # a rank that ends takes its connections with it
        except Exception as failure:
            dist.final_message(str(failure), getattr(failure, "exit_code", 1))
            return failure
        dist.shutdown()
        return result

    # Only a main thread may say what a signal does.
    with patch.object(signal, "signal"), ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
