"""What processes exchange: in the order of ranks, unchanged, on one machine and on several; and how failures spread."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import joined, together
from torch.distributed import HashStore

from quantizers.distributed import torch_group
from quantizers.distributed.process_group import ProcessGroup, launched
from quantizers.distributed.torch_group import DistributedGroup, node_numbers
from quantizers.system.errors import InputError, Interrupted, PeerFailed, QuantizeError

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", range(1, 6))
def test_every_item_is_one_ranks(count: int) -> None:
    dist = ProcessGroup()
    dist.world_size = count
    for items in range(12):
        parts = [dist.partition(items, rank) for rank in range(count)]
        assert [i for part in parts for i in part] == list(range(items))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert dist.partition(items) == parts[0]


def test_rows_are_gathered_in_the_order_of_ranks() -> None:
    """Whichever rank comes first, in any dtype; a rank may have no rows."""

    def work(dist: DistributedGroup) -> dict[str, torch.Tensor]:
        time.sleep(0.02 * (3 - dist.rank))
        own = [i for i in dist.partition(6) if dist.rank != 1]
        parts = {
            "a": torch.tensor(own, dtype=torch.int8),
            "b": torch.tensor(own).bfloat16()[:, None].expand(-1, 3),
            "c": torch.tensor(own).bool(),
        }
        return dist.all_gather(parts if own else {}, CPU)

    for got in together(3, work):
        assert isinstance(got, dict)
        assert torch.equal(got["a"], torch.tensor([0, 1, 4, 5], dtype=torch.int8))
        assert torch.equal(got["b"], torch.tensor([0, 1, 4, 5]).bfloat16()[:, None].expand(-1, 3))
        assert torch.equal(got["c"], torch.tensor([0, 1, 4, 5]).bool())


def test_a_tensor_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the existing memory, also where a chunk ends within a number."""
    monkeypatch.setattr(torch_group, "CHUNK", 10)
    wanted = torch.arange(7.0).view(7, 1) / 3

    def work(dist: DistributedGroup) -> torch.Tensor:
        whole = torch.zeros(9, 1)
        whole[1:8] = wanted if dist.rank == 1 else 0
        dist.broadcast(whole[1:8], 1)
        dist.broadcast(whole[:0], 0)
        return whole

    for got in together(2, work):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got[1:8], wanted)
        assert not got[[0, 8]].any()


@pytest.mark.parametrize("nodes", [1, 2])
def test_objects_machines_and_turns(nodes: int, tmp_path: Path) -> None:
    large = {"text": "x" * 12_345, "layers": [1, None]}

    def work(dist: DistributedGroup) -> Any:
        def make() -> int:
            number = len(list(tmp_path.iterdir()))
            (tmp_path / str(dist.rank)).touch()
            return number

        assert dist.broadcast_object(large if dist.is_main else None) == large
        assert dist.all_gather_object((dist.rank, large)) == [(rank, large) for rank in range(4)]
        return dist.node, dist.local_rank, dist.local_world_size, dist.in_turn(make)

    each = 4 // nodes
    for rank, found in enumerate(together(4, work, nodes)):
        assert isinstance(found, tuple)
        assert found[:3] == (rank // each, rank % each, each)
        assert found[3] == 0 if rank == 0 else found[3] >= (nodes if rank % each else 1)


def test_ranks_are_numbered_machine_by_machine() -> None:
    assert node_numbers([0, 1, 0, 0, 1, 2]) == [0, 0, 1, 2, 2, 2]
    for local_ranks, rank in (([0, 0, 1, 1], 3), ([1, 0], 0), ([0, 2], 1)):
        with pytest.raises(InputError, match=f"rank {rank} has local rank {local_ranks[rank]}"):
            node_numbers(local_ranks)


def test_the_environment_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "4")  # as on some clusters, without torchrun
    monkeypatch.setenv("RANK", "0")
    assert launched() is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "3")
    assert launched() == (3, 4, 1)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None


def test_processes_on_different_devices() -> None:
    def work(dist: DistributedGroup) -> None:
        dist.all_gather_object("cpu") if dist.is_main else dist.connect(torch.device("cuda:1"))

    ended = together(2, work)
    assert "rank 1 of 2 on host0 has the device cuda:1, but rank 0 is on cpu" in str(ended[1])


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_the_first_failure_is_printed(nodes: int) -> None:
    """All end with its exit code, also those that the launcher stops meanwhile; another machine prints it once too."""
    ended_by, prints = dict[int, QuantizeError](), dict[int, bool]()

    def work(dist: DistributedGroup) -> None:
        try:
            if dist.rank == 1:
                raise InputError("--option 1", "what is wrong", "correct it")
            dist.barrier()
        except QuantizeError as failure:
            failure = Interrupted("", "stopped", "", 15) if dist.rank == 3 else failure
            ended_by[dist.rank], prints[dist.rank] = dist.first_failure(failure)
            raise

    ended = together(4, work, nodes)
    assert [type(failure) for failure in ended] == [PeerFailed, InputError, PeerFailed, PeerFailed]
    assert prints == {0: False, 1: True, 2: nodes == 2, 3: False}
    first = {"code": 2, "place": "--option 1", "problem": "what is wrong", "remedy": "correct it"}
    assert [ended_by[rank].as_dict() for rank in range(4)] == [first] * 4


def test_a_signal_ends_a_wait() -> None:
    def stop() -> None:
        raise Interrupted("", "stopped", "", 15)

    def work(dist: DistributedGroup) -> None:
        if dist.is_main:
            dist.watch(stop)
        else:
            time.sleep(0.1)
        dist.barrier()
        dist.barrier()

    ended = together(2, work)
    assert isinstance(ended[0], Interrupted)
    assert isinstance(ended[1], PeerFailed)


@pytest.mark.slow
def test_a_wait_ends_with_the_timeout() -> None:
    def work(dist: DistributedGroup) -> None:
        if dist.is_main:
            dist._timeout = timedelta(seconds=0.1)
            dist.barrier()
        dist.all_gather_object(1)

    first, second = together(2, work, longest=timedelta(seconds=3))
    assert str(first) == (
        "rank 0 of 2 on host0: another process is lost (no answer for 0:00:00.100000); the launcher's report says "
        "which; give the same command again to resume"
    )
    assert isinstance(second, PeerFailed)


class LostStore(HashStore):
    """The store of a launcher that was killed."""

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("connection reset")


@pytest.mark.parametrize("local_rank", [0, 1])
def test_without_a_store_one_process_of_each_machine_prints(local_rank: int) -> None:
    dist = joined(HashStore(), 0, 1)
    dist._store, dist.local_rank = LostStore(), local_rank
    lost = QuantizeError("", "lost")
    assert dist.first_failure(lost) == (lost, local_rank == 0)
