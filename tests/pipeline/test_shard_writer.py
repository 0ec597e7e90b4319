"""Shards written while the next layers are worked on: in turn, in order, each error in its layer's turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.pipeline.shard_writer import ShardWriter
from quantizers.system.errors import QuantizeError


class Two(ProcessGroup):
    """Rank 0 of two processes of one machine, of which the other has nothing to write."""

    world_size = 2
    nodes = (0, 0)


class Later(Executor):
    """Does what is submitted when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(function(*arguments, **named))
            except QuantizeError as failure:
                done.set_exception(failure)

        self.waiting.append(work)
        return done

    def work(self) -> None:
        """All that is waiting."""
        while self.waiting:
            self.waiting.pop(0)()


def test_how_many_shards_may_be_on_their_way() -> None:
    later = Later()
    assert ShardWriter(SINGLE_PROCESS, later, background=False).pending == 0
    assert ShardWriter(SINGLE_PROCESS, later, background=True).pending == 1
    two = ShardWriter(Two(), later, background=True)
    assert (two.pending, two.has_turn(0), two.has_turn(1)) == (1, True, False)


def test_shards_are_finished_in_their_order_and_a_layer_behind() -> None:
    later = Later()
    writer = ShardWriter(SINGLE_PROCESS, later, background=True)
    found = []
    for number in range(3):
        writer.begin(number, lambda number=number: f"audit {number}", lambda number=number: f"digest {number}")
        later.waiting.pop(0)()  # the audit reads the source's memory, and is always waited for
        found.append(writer.finished())
        later.work()
    assert [list(shards) for shards in found] == [[], [0], [1]]
    assert writer.finished(pending=0) == {2: ("digest 2", "audit 2")}


def test_a_shard_that_cannot_be_written_fails_after_the_layers_before_it() -> None:
    """They are finished, and are journaled first."""
    later = Later()
    writer = ShardWriter(SINGLE_PROCESS, later, background=True)

    def full() -> str:
        raise QuantizeError("", "no room")

    writer.begin(0, lambda: "audit", lambda: "digest")
    writer.begin(1, lambda: "audit", full)
    later.work()
    assert list(writer.finished()) == [0]
    with pytest.raises(QuantizeError, match="no room"):
        writer.finished(pending=0)
