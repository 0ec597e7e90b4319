"""Copies beside the work: whatever is waited for has arrived, and no memory is used again before it may be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_copies import AtOnce, Delayed, Hosts, delay

from quantizers.device import crossing
from quantizers.device.prefetch import behind, beside, pin

CPU, CARD = torch.device("cpu"), torch.device("cuda:0")
LENGTHS = [8, 8, 8, 3]


@pytest.fixture(params=[Delayed, AtOnce])
def stream(request: pytest.FixtureRequest) -> Delayed:
    made: Delayed = request.param()
    return made


@pytest.fixture
def hosts(stream: Delayed, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return delay(monkeypatch, stream)


def two_columns(hosts: Hosts) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbered rows of two tensors in the host's memory, of other widths and dtypes."""
    rows = sum(LENGTHS)
    numbers = torch.arange(3 * rows, dtype=torch.float32).view(rows, 3)
    return hosts.add(numbers), hosts.add(torch.arange(rows, dtype=torch.int32).view(rows, 1))


@pytest.mark.parametrize("lengths", [LENGTHS, [5], [3, 8, 8, 1], []], ids=str)
def test_each_part_is_there_in_its_turn(lengths: list[int], hosts: Hosts, stream: Delayed) -> None:
    wide, narrow = two_columns(hosts)
    parts = list(
        zip(torch.split(wide[: sum(lengths)], lengths), torch.split(narrow[: sum(lengths)], lengths), strict=True)
    )
    places = set[int]()
    for wanted, (first, second) in zip(parts, ahead(parts, CPU), strict=True):
        assert torch.equal(first, wanted[0])
        assert torch.equal(second, wanted[1])
        assert hosts.lies_there(first, CPU)
        places.add(first.data_ptr())
    assert len(places) == min(2, len(lengths)), "two pieces of memory take turns"
    assert stream.copied == 2 * len(lengths)
    assert stream.most == min(len(lengths), 1 if isinstance(stream, AtOnce) else 2)


def test_what_lies_there_is_given_as_it_is(hosts: Hosts, stream: Delayed) -> None:
    wide, _ = two_columns(hosts)
    here = wide.clone()
    parts = list(zip(wide.split(LENGTHS), here.split(LENGTHS), strict=True))
    for wanted, (first, second) in zip(here.split(LENGTHS), ahead(parts, CPU), strict=True):
        assert torch.equal(first, wanted)
        assert second.data_ptr() == wanted.data_ptr()
    assert stream.copied == len(LENGTHS)
    assert [own.data_ptr() for (own,) in ahead([(here,)], CPU)] == [here.data_ptr()]
    assert stream.copied == len(LENGTHS)


def test_whoever_gives_up_leaves_nothing_under_way(hosts: Hosts, stream: Delayed) -> None:
    """The memory is given back then, and the next operation may get it."""
    wide, _ = two_columns(hosts)
    parts = ahead([(part,) for part in wide.split(LENGTHS)], CPU)
    next(parts)
    del parts
    gc.collect()
    assert stream.under_way == 0


def test_results_have_arrived_when_the_block_ends(hosts: Hosts, stream: Delayed) -> None:
    wide, narrow = two_columns(hosts)
    wanted = wide * 2 + 1
    with behind(CPU) as put:
        places = wide.split(LENGTHS)
        for (rows,), place in zip(ahead([(part,) for part in places], CPU), places, strict=True):
            put([(place, rows * 2 + 1)])  # in place: what comes next is other rows
            assert stream.under_way <= 2
        put([(narrow, torch.full_like(narrow, 7, dtype=torch.int64))])
    assert torch.equal(wide, wanted)
    assert torch.equal(narrow, torch.full_like(narrow, 7))
    assert stream.under_way == 0


def test_results_have_arrived_when_something_fails(hosts: Hosts, stream: Delayed) -> None:
    wide, _ = two_columns(hosts)

    def fail() -> None:
        with behind(CPU) as put:
            put([(wide, torch.ones_like(wide))])
            raise ValueError("spoilt")

    with pytest.raises(ValueError, match="spoilt"):
        fail()
    assert stream.under_way == 0
    assert bool((wide == 1).all())


def test_results_that_stay_do_not_cross(hosts: Hosts, stream: Delayed) -> None:
    place = torch.zeros(3)
    with behind(CPU) as put:
        put([(place, torch.ones(3))])
        assert bool(place.all())
    assert stream.copied == 0


def test_without_a_stream_copies_are_made_at_once() -> None:
    place = torch.zeros(3)
    under_way = beside([(place, torch.ones(3))], CPU)
    assert bool(place.all())
    under_way.wait()
    under_way.finish()


@pytest.mark.on_device
@pytest.mark.parametrize("registered", [False, True])
def test_rows_go_to_the_device_and_back(registered: bool, device: torch.device) -> None:
    """Twice, in blocks whose work takes longer than their copies; in place, from the host's memory to the host's."""
    rows = torch.randn(20, 4096, 64, generator=torch.Generator().manual_seed(0))
    if registered:
        pin(rows, device)
    wanted, weight = rows.clone(), torch.eye(64).repeat(40, 1, 1)
    for _ in range(2):
        with behind(device) as put:
            for place, (block,) in zip(rows, ahead([(part,) for part in rows], device), strict=True):
                for matrix in weight.to(device):
                    block = block @ matrix  # noqa: PLW2901
                put([(place, block + 1)])
    assert torch.equal(rows, wanted + 1 + 1)


def test_a_gpu_copies_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which torch is told, by a CUDA that writes down what it is asked for."""
    told: list[Any] = []
    on = ["work"]

    class Stream:
        def __init__(self, device: torch.device) -> None:
            told.append(("stream", str(device)))

        def wait_stream(self, other: Any) -> None:
            told.append(("copies wait for", other.name))

        def record_event(self) -> Any:
            told.append("mark")
            return SimpleNamespace(synchronize=lambda: told.append("host waits"))

    @contextmanager
    def within(stream: Stream) -> Iterator[None]:
        on.append("copies")
        yield
        on.pop()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        on.append(str(device))
        yield
        on.pop()

    def copy(target: Any, source: Any, non_blocking: bool = False) -> None:
        assert on == ["work", "cuda:0", "copies"], "which a thread's current device may not be"
        told.append(("copy", on[-1], non_blocking))

    work = SimpleNamespace(name="work", wait_event=lambda event: told.append("work waits"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: work)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    crossing._of_gpu.cache_clear()
    try:
        pairs = [(torch.zeros(2), torch.zeros(2)) for _ in range(2)]
        under_way = beside(pairs, CARD)
        under_way.wait()
        under_way.finish()
        beside(pairs[:1], torch.device("cuda"))
    finally:
        crossing._of_gpu.cache_clear()
    copied = ("copy", "copies", True)
    assert told == [
        ("stream", "cuda:0"), ("copies wait for", "work"), copied, copied, "mark", "work waits", "host waits",
        ("copies wait for", "work"), copied, "mark",
    ]  # fmt: skip
