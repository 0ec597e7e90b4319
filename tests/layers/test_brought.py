"""Parts on a device: the next one crosses while one is in use, and each has the bytes of the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from delayed_copies import AtOnce, Delayed, delay
from tiny import make

from quantizers.checkpoint.ahead import held_ahead
from quantizers.checkpoint.held import hold
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.layers.brought import Brought

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make(tmp_path_factory.mktemp("brought") / "model", num_hidden_layers=4))


def parts_of(model: Checkpoint) -> Sequence[list[str]]:
    """Those of each layer; of the second a few only, so that its bytes are fewer."""
    parts = [[name for name in model.tensors if name.startswith(f"model.layers.{n}.")] for n in range(4)]
    parts[1] = parts[1][:3]
    return parts


@pytest.mark.parametrize("stream", [Delayed(), AtOnce()], ids=["late", "at once"])
def test_each_part_has_its_bytes_while_it_is_in_use(
    stream: Delayed, model: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay(monkeypatch, stream)
    brought, places = Brought(CPU, early=True), set[int]()
    with closing(held_ahead(model, parts_of(model), prepare=brought.make_room, arrived=brought.begin)) as ahead:
        for names, part in zip(parts_of(model), ahead, strict=True):
            there = brought.take(part)
            assert there.buffer is not None
            assert part.buffer is not None
            assert there.buffer.data_ptr() != part.buffer.data_ptr()
            places.add(there.buffer.data_ptr())
            time.sleep(0.05)  # the thread reads the next one meanwhile, which begins to cross
            assert part.digest() == hold(model, names).digest()
            for name in names:
                assert there.holds(there.tensor(name))
                assert there.raw(name) == model.raw(name)
    assert len(places) == 2
    assert stream.copied == 4


def test_what_nobody_takes_is_waited_for(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its memory is given back, there and on the host, from which it crosses: the buffers are gone by then."""
    stream = Delayed()
    delay(monkeypatch, stream)
    brought = Brought(CPU, early=True)
    with closing(held_ahead(model, parts_of(model), prepare=brought.make_room, arrived=brought.begin)) as ahead:
        brought.take(next(ahead))
        while not stream.under_way:  # until the thread has read the next one
            time.sleep(0.001)
    del ahead
    brought.give_up()
    assert (stream.under_way, stream.copied) == (0, 2)


def test_without_room_each_part_crosses_when_it_is_asked_for(model: Checkpoint) -> None:
    names = parts_of(model)[0]
    part = hold(model, names)
    for device in (CPU, META):
        brought = Brought(device, early=False)
        brought.make_room(part.buffer)  # type: ignore[arg-type]  # it has one
        brought.begin(part)
        there = brought.take(part)
        assert (there is part) == (device == CPU)
        assert there.tensor(names[0]).device == device
