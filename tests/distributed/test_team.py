"""What processes pass on to each other: in the order of ranks, unchanged, on one machine and on several."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import together

from quantizers.distributed import distributed
from quantizers.distributed.launch import Distributed, join, launched, node_numbers
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.distributed.shared_memory import shared_memory
from quantizers.system.errors import InputError

CPU = torch.device("cpu")


def shares(count: int) -> list[ProcessGroup]:
    teams = [ProcessGroup() for _ in range(count)]
    for rank, dist in enumerate(teams):
        dist.rank, dist.world_size = rank, count
    return teams


@pytest.mark.parametrize("count", range(1, 6))
def test_every_item_is_one_processs(count: int) -> None:
    dist = shares(count)
    for items in range(12):
        assert [i for one in dist for i in one.share(items)] == list(range(items))
        sizes = [len(one.share(items)) for one in dist]
        assert max(sizes) - min(sizes) <= 1
        assert [dist[0].share(items, rank) for rank in range(count)] == [one.share(items) for one in dist]


def test_alone_nothing_happens() -> None:
    rows = torch.arange(3)
    SINGLE_PROCESS.barrier()
    SINGLE_PROCESS.broadcast(rows)
    SINGLE_PROCESS.connect(CPU)
    SINGLE_PROCESS.finish()
    assert (SINGLE_PROCESS.tell(7), SINGLE_PROCESS.collect(7), SINGLE_PROCESS.in_turn(lambda: 5)) == (7, [7], 5)
    assert SINGLE_PROCESS.gather({"rows": rows}, CPU)["rows"] is rows
    assert SINGLE_PROCESS.last_words("what happened", 2) == ("what happened", 2)
    assert SINGLE_PROCESS.here is SINGLE_PROCESS
    assert SINGLE_PROCESS.heads is SINGLE_PROCESS
    assert list(SINGLE_PROCESS.ranks_of(0)) == [0]


def test_rows_are_gathered_in_the_order_of_ranks() -> None:
    """Whoever comes first, in any dtype; a rank may have none."""

    def work(dist: Distributed) -> dict[str, torch.Tensor]:
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


def test_a_tensor_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the memory that is there, also where a piece ends within a number."""
    monkeypatch.setattr(distributed, "PIECE", 10)
    wanted = torch.arange(7.0).view(7, 1) / 3

    def work(dist: Distributed) -> torch.Tensor:
        whole = torch.zeros(9, 1)
        whole[1:8] = wanted if dist.rank == 1 else 0
        dist.broadcast(whole[1:8], 1)
        dist.broadcast(whole[:0], 0)
        return whole

    for got in together(2, work):
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got[1:8], wanted)
        assert not got[[0, 8]].any()


def test_objects_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what one value of the store holds; and what nobody reads any more is removed from the store."""
    monkeypatch.setattr(distributed, "IN_STORE", 1000)
    large = {"text": "x" * 12_345, "layers": [1, None]}

    def work(dist: Distributed) -> Any:
        told = [dist.broadcast_object(large if dist.is_main else None) for _ in range(3)]
        said = dist.all_gather_object((dist.rank, large["text"]))
        dist.barrier()
        return told, said, len(dist._kept)

    for got in together(3, work):
        assert got == (3 * [large], [(rank, large["text"]) for rank in range(3)], 1)


@pytest.mark.parametrize("nodes", [1, 2])
def test_machines_and_who_goes_first(nodes: int, tmp_path: Path) -> None:
    def work(dist: Distributed) -> Any:
        def make() -> int:
            number = len(list(tmp_path.iterdir()))
            (tmp_path / f"{nodes}-{dist.rank}").touch()
            return number

        first = dist.in_turn(make)
        here, heads = dist.here.all_gather_object(dist.rank), dist.heads.all_gather_object(dist.rank)
        return dist.node, dist.local_rank, here, heads, list(dist.ranks_of(dist.node)), dist.nodes, first

    got = together(4, work, nodes)
    each = 4 // nodes
    for rank, found in enumerate(got):
        assert isinstance(found, tuple)
        node, local, here, heads, ranks, machines, first = found
        own = list(range(rank // each * each, (rank // each + 1) * each))
        assert (node, local, here, ranks, machines) == (rank // each, rank % each, own, own, nodes)
        assert heads == ([0, 2] if nodes == 2 and local == 0 else [rank])
        assert first == 0 if rank == 0 else first >= (nodes if local else 1)


def test_the_first_of_each_machine_pass_on_tensors() -> None:
    def work(dist: Distributed) -> list[int]:
        tensor = torch.full((3,), dist.rank)
        dist.heads.broadcast(tensor, dist.heads.world_size - 1)
        return list(tensor.tolist())

    assert together(4, work, 2) == [3 * [2], 3 * [1], 3 * [2], 3 * [3]]


def test_memory_that_all_processes_of_a_machine_see() -> None:
    """One writes, all read; it lies on no disk, and has no name once all have mapped it."""

    def work(dist: Distributed) -> Any:
        with shared_memory(dist.here, 8) as path:
            memory = torch.from_file(str(path), shared=True, size=8, dtype=torch.uint8)
            assert str(path).startswith("/proc/")
        if dist.here.is_main:
            memory.copy_(torch.arange(8) + dist.rank)
        dist.barrier()
        return memory.tolist(), path

    got = together(4, work, 2)
    for rank, found in enumerate(got):
        assert isinstance(found, tuple)
        assert found[0] == [i + rank // 2 * 2 for i in range(8)]


def test_ranks_are_numbered_machine_by_machine() -> None:
    assert node_numbers([0, 1, 0, 0, 1, 2]) == [0, 0, 1, 2, 2, 2]
    for locals_, rank in (([0, 0, 1, 1], 3), ([1, 0], 0), ([0, 2], 1)):
        with pytest.raises(InputError, match=f"rank {rank} is process {locals_[rank]} of its machine"):
            node_numbers(locals_)


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
    assert type(join()) is ProcessGroup


def test_processes_on_different_devices() -> None:
    def work(dist: Distributed) -> None:
        dist.all_gather_object("cpu") if dist.is_main else dist.connect(torch.device("cuda:1"))

    ended = together(2, work)
    assert "rank 1 of 2 on host0 has the device cuda:1, but rank 0 is on cpu" in str(ended[1])
