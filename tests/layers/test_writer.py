"""Shards written while the next layers are worked on: in turn, in order, each error in its layer's turn."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import write_job

from quantizers.checkpoint.held import hold, layer_names
from quantizers.layers.writer import ShardWriter
from quantizers.plan.job import prepare
from quantizers.run.quantizer import audit_shard
from quantizers.system.errors import CheckpointError, QuantizeError
from quantizers.team.team import ALONE, Team


class Two(Team):
    """Rank 0 of two processes of one machine, of which the other has nothing to write."""

    count = 2

    def ranks_of(self, node: int) -> range:
        return range(2)


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
    assert ShardWriter[int, int](ALONE, later, background=False).ahead == 0
    assert ShardWriter[int, int](ALONE, later, background=True).ahead == 1
    two = ShardWriter[int, int](Two(), later, background=True)
    assert (two.ahead, two.has_turn(0), two.has_turn(1)) == (1, True, False)


def test_shards_are_finished_in_their_order_and_a_layer_behind() -> None:
    later = Later()
    writer = ShardWriter[str, str](ALONE, later, background=True)
    found = []
    for number in range(3):
        writer.begin(number, lambda number=number: f"audit {number}", lambda number=number: f"digest {number}")
        later.waiting.pop(0)()  # the audit reads the source's memory, and is always waited for
        found.append(writer.finished())
        later.work()
    assert [list(shards) for shards in found] == [[], [0], [1]]
    assert writer.finished(ahead=0) == {2: ("digest 2", "audit 2")}


def test_a_shard_that_cannot_be_written_fails_after_the_layers_before_it() -> None:
    """They are finished, and are journaled first."""
    later = Later()
    writer = ShardWriter[str, str](ALONE, later, background=True)

    def full() -> str:
        raise QuantizeError("no room")

    writer.begin(0, lambda: "audit", lambda: "digest")
    writer.begin(1, lambda: "audit", full)
    later.work()
    assert list(writer.finished()) == [0]
    with pytest.raises(QuantizeError, match="no room"):
        writer.finished(ahead=0)


def test_an_audit_that_fails_waits_for_the_copy_that_its_shard_is_written_from(tmp_path: Path) -> None:
    """The file is written next, by the same thread, from memory to which the packed layer may still be copied."""
    job, told = prepare(str(write_job(tmp_path / "job", "glm4_moe"))), list[str]()
    source = hold(job.opened, layer_names(job.opened, job.facts, 1))
    missing = source.only(list(source.tensors)[:1])
    crossing: Any = SimpleNamespace(finish=lambda: told.append("arrived"))
    with pytest.raises((CheckpointError, KeyError)):
        audit_shard(job, 1, missing, source, crossing, torch.device("cpu"))
    assert told == ["arrived"]
