"""Ranks that are threads of one process: the store and gloo are real, launchers and machines are not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from quantizers.distributed.torch_group import DistributedGroup, exchange_places

Result = TypeVar("Result")
LONGEST = timedelta(seconds=30)  # after a failure a thread, unlike a process, leaves its collective only then


def joined(store: HashStore, rank: int, count: int, nodes: int = 1) -> DistributedGroup:
    """One of `count` ranks, evenly on so many machines."""
    each = count // nodes
    places = exchange_places(store, rank, count, (f"host{rank // each}", rank % each))
    group = ProcessGroupGloo(PrefixStore("torch", store), rank, count, LONGEST)
    return DistributedGroup(group, store, rank, places)


def together(
    count: int, work: Callable[[DistributedGroup], Result], nodes: int = 1, store: HashStore | None = None
) -> list[Result | Exception]:
    """`work` by `count` ranks: what each returned or raised. A rank that raises tells the others, as main() does."""
    store = store or HashStore()
    groups: list[
        DistributedGroup
    ] = []  # all live until every rank has ended: one that goes takes its connections along

    def one(rank: int) -> Result | Exception:
        dist = joined(store, rank, count, nodes)
        groups.append(dist)
        try:
            result = work(dist)
            dist.barrier()
        except Exception as failure:
            dist.final_message(str(failure), getattr(failure, "exit_code", 1))
            return failure
        return result

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
