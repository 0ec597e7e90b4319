"""Ranks that are threads of one process: the store and gloo are real, launchers and machines are not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from quantizers.distributed.torch_group import DistributedGroup, exchange_places
from quantizers.system.errors import QuantizeError

Result = TypeVar("Result")
LONGEST = timedelta(seconds=30)  # of a collective: in a thread, one that never ends keeps its group until then


def joined(store: HashStore, rank: int, count: int, nodes: int = 1, longest: timedelta = LONGEST) -> DistributedGroup:
    """One of `count` ranks, evenly on `nodes` machines."""
    each = count // nodes
    places = exchange_places(store, rank, count, (f"host{rank // each}", rank % each))
    group = ProcessGroupGloo(PrefixStore("torch", store), rank, count, longest)
    return DistributedGroup(group, store, rank, places)


def together(
    count: int, work: Callable[[DistributedGroup], Result], nodes: int = 1, longest: timedelta = LONGEST
) -> list[Result | Exception]:
    """`work` by `count` ranks: what each returned or raised. A rank that raises tells the others, as main() does."""
    store = HashStore()
    groups: list[DistributedGroup] = []  # alive until every rank has ended: one that goes closes its connections

    def one(rank: int) -> Result | Exception:
        dist = joined(store, rank, count, nodes, longest)
        groups.append(dist)
        try:
            result = work(dist)
            dist.barrier()
        except Exception as failure:
            dist.first_failure(failure if isinstance(failure, QuantizeError) else QuantizeError("", str(failure)))
            failure.__context__ = None  # its frames hold the group
            return failure.with_traceback(None)
        return result

    def leave(dist: DistributedGroup) -> None:
        """All at once: the end of one interrupts a collective in which another still is."""
        del dist._group

    with ThreadPoolExecutor(count) as pool:
        ended = list(pool.map(one, range(count)))
        list(pool.map(leave, groups))
    return ended
