"""Prefetch and page-locked memory: what is waited for has arrived, and no memory is used again before it may be."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from delayed_copies import AtOnce, Delayed, Hosts, delay
from tiny import make

from quantizers.checkpoint.loaded_tensors import LoadedTensors, load_tensors, prefetched_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.device import prefetch
from quantizers.device.prefetch import BufferPrefetch, PinnedBuffers, pin, prefetched, start_copies

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
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
    for wanted, (first, second) in zip(parts, prefetched(parts, CPU), strict=True):
        assert torch.equal(first, wanted[0])
        assert torch.equal(second, wanted[1])
        assert hosts.is_on(first, CPU)
        places.add(first.data_ptr())
    assert len(places) == min(2, len(lengths)), "two pieces of memory take turns"
    assert stream.copied == 2 * len(lengths)
    assert stream.most == min(len(lengths), 1 if isinstance(stream, AtOnce) else 2)


def test_parts_on_the_device_are_returned_as_they_are(hosts: Hosts, stream: Delayed) -> None:
    part = torch.arange(3)
    assert [tensor.data_ptr() for (tensor,) in prefetched([(part,)], CPU)] == [part.data_ptr()]
    assert stream.copied == 0


def test_whoever_gives_up_leaves_nothing_under_way(hosts: Hosts, stream: Delayed) -> None:
    """The memory is given back then, and the next operation may get it."""
    wide, _ = two_columns(hosts)
    parts = prefetched([(part,) for part in wide.split(LENGTHS)], CPU)
    next(parts)
    del parts
    gc.collect()
    assert stream.under_way == 0


@pytest.mark.on_device
@pytest.mark.parametrize("registered", [False, True])
def test_rows_go_to_the_device_and_back(registered: bool, device: torch.device) -> None:
    """Twice, in blocks whose work takes longer than their copies; in place, from the host's memory to the host's."""
    rows = torch.randn(5, 4096, 64, generator=torch.Generator().manual_seed(0))
    if registered:
        pin(rows, device)
    wanted, weight = rows.clone(), torch.eye(64).repeat(20, 1, 1)
    for _ in range(2):
        for place, (block,) in zip(rows, prefetched([(part,) for part in rows], device), strict=True):
            place.copy_(reduce(torch.matmul, weight.to(device), block) + 1)
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
    prefetch._copy_stream.cache_clear()
    try:
        pairs = [(torch.zeros(2), torch.zeros(2)) for _ in range(2)]
        under_way = start_copies(pairs, GPU)
        under_way.before_next_work()
        under_way.wait()
        start_copies(pairs[:1], torch.device("cuda"))
    finally:
        prefetch._copy_stream.cache_clear()
    copied = ("copy", "copies", True)
    assert told == [
        ("stream", "cuda:0"), ("copies wait for", "work"), copied, copied, "mark", "work waits", "host waits",
        ("copies wait for", "work"), copied, "mark",
    ]  # fmt: skip


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes that a driver, which is not here, has registered at each address; it refuses more than 1,000."""
    held: dict[int, int] = {}
    prefetch._print_refusal.cache_clear()
    states = SimpleNamespace(success=0, invalid=1)

    def register(address: int, size: int, flags: int) -> int:
        assert address not in held
        assert flags == 0
        if size > 1000:
            return states.invalid
        held[address] = size
        return states.success

    runtime = SimpleNamespace(
        cudaError=states, cudaHostRegister=register, cudaHostUnregister=held.pop,
        cudaGetErrorString=lambda failure: f"error {failure}",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    real = torch.zeros

    def on_this_cpu(*size: int, device: torch.device | None = None, **named: Any) -> torch.Tensor:
        return real(*size, **named)

    monkeypatch.setattr(torch, "zeros", on_this_cpu)
    return held


def test_memory_is_registered_and_released(driver: dict[int, int]) -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    pin(buffer, GPU)
    assert driver == {buffer.data_ptr(): 100}
    del buffer
    gc.collect()
    assert driver == {}


def test_where_it_cannot_be_locked_it_is_said(driver: dict[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    buffer = torch.zeros(1001, dtype=torch.uint8)
    pin(buffer, GPU)
    other = torch.zeros(1002, dtype=torch.uint8)
    pin(other, GPU)
    assert not driver
    (line,) = capsys.readouterr().err.splitlines()
    assert "host memory cannot be locked (error 1); see ulimit -l" in line


@pytest.mark.usefixtures("driver")
def test_a_refusal_is_not_taken_for_the_error_of_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's last error stays until somebody asks for it, and torch asks after each kernel."""
    launched = []

    def zeros(size: int, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    buffer = torch.zeros(1001, dtype=torch.uint8)
    monkeypatch.setattr(torch, "zeros", zeros)
    pin(buffer, GPU)
    assert launched == [GPU]


def test_two_buffers_take_turns(driver: dict[int, int]) -> None:
    buffers, given = PinnedBuffers(GPU), list[torch.Tensor]()
    for size in (8, 10, 8, 9, 12):
        given.append(buffers.next(size))
        assert len(given[-1]) == size
        assert given[-1].data_ptr() in driver
    places = [one.data_ptr() for one in given]
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert len(set(places)) == 3, "the last was too large for the first buffer"


@pytest.mark.on_device
def test_tensors_come_to_the_host_in_one_buffer(device: torch.device) -> None:
    """Of any dtype, each aligned for it; what is on the CPU stays where it is."""
    made = {"bytes": torch.arange(5, dtype=torch.int8), "words": torch.arange(6).view(2, 3), "empty": torch.empty(0, 2)}
    found = PinnedBuffers(device).copied({name: tensor.to(device) for name, tensor in made.items()})
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in made.items())
    if device.type != "cpu":
        assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make(tmp_path_factory.mktemp("prefetch") / "model", num_hidden_layers=4))


def parts_of(model: Checkpoint) -> Sequence[list[str]]:
    """Those of each layer; of the second a few only, so that its bytes are fewer."""
    parts = [[name for name in model.tensors if name.startswith(f"model.layers.{n}.")] for n in range(4)]
    parts[1] = parts[1][:3]
    return parts


@pytest.mark.parametrize("stream", [Delayed(), AtOnce()], ids=["late", "at once"])
def test_each_layer_has_its_bytes_while_it_is_in_use(
    stream: Delayed, model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay(monkeypatch, stream)
    following, places = BufferPrefetch(CPU), set[int]()
    with closing(
        prefetched_tensors(model, parts_of(model), prepare=following.allocate, arrived=begin(following))
    ) as ahead:
        for names, part in zip(parts_of(model), ahead, strict=True):
            there = part.to(CPU, following.take())
            assert there.buffer is not None
            assert part.buffer is not None
            assert there.buffer.data_ptr() != part.buffer.data_ptr()
            places.add(there.buffer.data_ptr())
            time.sleep(0.05)  # the thread reads the next one meanwhile, and begins to copy it
            assert part.digest() == load_tensors(model, names).digest()
            for name in names:
                assert there.holds(there.tensor(name))
                assert there.raw(name) == model.raw(name)
    assert len(places) == 2
    assert stream.copied == 4


def begin(following: BufferPrefetch) -> Any:
    def arrived(part: LoadedTensors) -> None:
        assert part.buffer is not None
        following.begin(part.buffer)

    return arrived


def test_a_layer_that_is_not_taken_is_waited_for(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its memory is given back, there and on the host, from which it is copied: the buffers are gone by then."""
    stream = Delayed()
    delay(monkeypatch, stream)
    following = BufferPrefetch(CPU)
    with closing(
        prefetched_tensors(model, parts_of(model), prepare=following.allocate, arrived=begin(following))
    ) as ahead:
        part = next(ahead)
        part.to(CPU, following.take())
        while not stream.under_way:  # until the thread has read the next one
            time.sleep(0.001)
    del ahead, part
    following.stop()
    assert (stream.under_way, stream.copied) == (0, 2)
