"""Memory that a GPU copies from and to by itself: registered once, and released before it is freed."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantizers.device import pinned
from quantizers.device.prefetch import Turns, is_pinned, pin

META, CARD = torch.device("meta"), torch.device("cuda:0")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes that a driver, which is not here, has registered at each address; it refuses more than 1,000."""
    held: dict[int, int] = {}
    pinned._say_why_slower.cache_clear()
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

    def without_a_card(*size: int, device: torch.device | None = None, **named: Any) -> torch.Tensor:
        return real(*size, **named)

    monkeypatch.setattr(torch, "zeros", without_a_card)
    return held


def test_memory_is_registered_once_and_released(driver: dict[int, int]) -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    pin(buffer, CARD)
    pin(buffer, CARD)
    assert driver == {buffer.data_ptr(): 100}
    assert is_pinned(buffer[20:30].view(torch.bfloat16))
    del buffer
    gc.collect()
    assert driver == {}


def test_where_it_cannot_be_locked_it_is_said(driver: dict[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    buffer = torch.zeros(1001, dtype=torch.uint8)
    pin(buffer, CARD)
    other = torch.zeros(1002, dtype=torch.uint8)
    pin(other, CARD)
    assert not driver
    assert not is_pinned(buffer)
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
    pin(buffer, CARD)
    assert launched == [CARD]


@pytest.mark.parametrize(("device", "noted"), [(torch.device("cpu"), False), (META, True)])
def test_without_a_gpu_nothing_is_registered(device: torch.device, noted: bool, driver: dict[int, int]) -> None:
    buffer = torch.zeros(100, dtype=torch.uint8)
    pin(buffer, device)
    assert is_pinned(buffer) == noted
    assert not driver


def test_two_pieces_take_turns() -> None:
    turns, given = Turns(META), list[Any]()
    for size in (8, 10, 8, 9, 12):
        given.append(turns.room(size))
        assert len(given[-1]) == size
        assert is_pinned(given[-1])
    places = [one.data_ptr() for one in given]
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert len(set(places)) == 3, "the last was too large for the first piece"
