"""A shard that is written while the next layers are begun: its bytes are those of its own layer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import write_job
from safetensors.torch import load_file

from quantizers.checkpoint.held import held_tensors, hold, layer_names
from quantizers.output.context import Context
from quantizers.plan.job import prepare
from quantizers.run import shards
from quantizers.run.shards import Shards
from quantizers.run.visit import Visit
from quantizers.system.errors import CheckpointError
from quantizers.system.residents import Residents
from quantizers.team.team import ALONE, Team
from stitch.write.shard import layer_tensors

KINDS = ("cpu", "meta")


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
        self.waiting.append(lambda: done.set_result(function(*arguments, **named)))
        return done


def test_the_sources_memory_gets_other_bytes_meanwhile(tmp_path: Path) -> None:
    """Kept tensors are views of it, some by another name."""
    job = prepare(str(write_job(tmp_path / "job", "glm4_moe")))
    (tmp_path / "output").mkdir()
    later = Later()
    context = Context(tmp_path, torch.device("cpu"), Residents.all_of(1), team=Two())
    own = Shards(job, context, later)
    assert own.ahead == 1
    assert [Shards(job, replace(context, team=ALONE, device=torch.device(one)), later).ahead for one in KINDS] == [0, 1]
    held = hold(job.opened, layer_names(job.opened, job.facts, 0))  # a dense layer: all of it is kept
    tensors = layer_tensors(job.plan, 0, held, None)
    wanted = {name: tensor.clone() for name, tensor in tensors.host.items()}
    own.begin(Visit(0, held, held), tensors, held_tensors(held, tensors.device, tmp_path / "x"))
    audit, store = later.waiting
    audit()
    assert own.finished() == {}
    assert held.buffer is not None
    held.buffer.zero_()
    store()
    assert list(own.finished()) == [0]
    found = load_file(tmp_path / "output" / job.plan.shard_file(0))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_an_audit_that_fails_waits_for_what_its_shard_is_written_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written next, by the same thread, from memory to which the packed layer may still be on its way."""
    job, told = prepare(str(write_job(tmp_path / "job", "glm4_moe"))), list[str]()

    def broken(*_: Any, **__: Any) -> None:
        told.append("audited")
        raise CheckpointError("the source is broken")

    monkeypatch.setattr(shards, "audit_layer", broken)
    own = Shards(job, Context(tmp_path, torch.device("cpu"), Residents.all_of(1)), Later())
    held = hold(job.opened, layer_names(job.opened, job.facts, 0))
    crossing = SimpleNamespace(finish=lambda: told.append("arrived"), wait=lambda: None)
    with pytest.raises(CheckpointError, match="the source is broken"):
        own.audit(Visit(0, held, held), held, crossing)
    assert told == ["audited", "arrived"]
