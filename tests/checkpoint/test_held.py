"""Parts of a checkpoint in memory: the same tensors, each byte read once, one part ahead and never more."""

from __future__ import annotations

import gc
import hashlib
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import make

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint import held as module
from quantizers.checkpoint.held import Held, held_ahead, held_tensors, hold, layer_names
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.checkpoint.tensor_bytes import DTYPES
from quantizers.system.errors import CheckpointError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make(tmp_path_factory.mktemp("held") / "model", num_hidden_layers=4))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were read, in their order."""
    names, real = list[str](), module.read_bytes

    def counted(info: Any) -> bytearray:
        names.append(info.name)
        return real(info)

    monkeypatch.setattr(module, "read_bytes", counted)
    return names


def parts_of(model: Checkpoint) -> list[list[str]]:
    facts = architecture_for(model.config, "config.json")
    return [layer_names(model, facts, number) for number in range(model.config["num_hidden_layers"])]


def test_a_part_answers_as_the_checkpoint_does(model: Checkpoint) -> None:
    names = parts_of(model)[1]
    part = hold(model, names)
    assert set(part.tensors) == set(names)
    for name in names:
        assert torch.equal(part.tensor(name).view(torch.uint8), model.tensor(name).view(torch.uint8))
        assert part.raw(name) == model.raw(name)
        assert part.sha256(name) == model.sha256(name) == hashlib.sha256(model.raw(name)).hexdigest()
    assert (part.folder, part.config, part.name) == (model.folder, model.config, model.name)


def test_a_part_has_no_other_tensors(model: Checkpoint) -> None:
    first, second = parts_of(model)[:2]
    part = hold(model, first)
    with pytest.raises(CheckpointError, match="missing"):
        part.require(second[0], "a test")
    with pytest.raises(KeyError):
        part.tensor(second[0])
    assert set(part.only(first[:2]).tensors) == set(part.only(first[:2]).stored) == set(first[:2])


def test_layers_ten_and_one_are_not_confused(model: Checkpoint) -> None:
    facts = architecture_for(model.config, "config.json")
    names = ["model.layers.1.a", "model.layers.10.a", "model.layers.1.b", "lm_head.weight"]
    checkpoint = Checkpoint(model.folder, "m", model.config, dict.fromkeys(names, next(iter(model.tensors.values()))))
    assert layer_names(checkpoint, facts, 1) == ["model.layers.1.a", "model.layers.1.b"]


def test_the_digest_is_over_names_and_bytes(model: Checkpoint) -> None:
    part = hold(model, parts_of(model)[0])
    assert part.digest() == hold(model, parts_of(model)[0]).digest()
    name = next(iter(part.stored))
    other = {**part.stored, name: part.tensor(name).clone()}
    other[name].view(torch.uint8).view(-1)[0] ^= 1
    assert held_tensors(model, other, Path("x")).digest() != part.digest()
    assert held_tensors(model, part.stored, Path("x")).digest() == part.digest()


def test_every_dtype_that_can_be_written_can_be_held(tmp_path: Path, model: Checkpoint) -> None:
    tensors = {name: torch.zeros(3, 2).to(getattr(torch, own)) for name, own in DTYPES.items()}
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    written = open_folder(tmp_path)
    made = held_tensors(model, tensors, tmp_path / "model.safetensors")
    for name, info in written.tensors.items():
        assert (made.tensors[name].dtype, made.tensors[name].shape) == (info.dtype, info.shape)
        assert made.sha256(name) == hold(written, [name]).sha256(name)


def test_each_part_comes_in_its_turn_and_each_tensor_is_read_once(model: Checkpoint, read: list[str]) -> None:
    parts = parts_of(model)
    for names, part in zip(parts, held_ahead(model, parts), strict=True):
        assert set(part.stored) == set(names)
    assert sorted(read) == sorted(name for names in parts for name in names)
    assert list(held_ahead(model, [])) == []


def test_at_most_two_parts_are_in_memory(model: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Held]] = []
    most, real = 0, hold

    def counted(*arguments: Any) -> Held:
        nonlocal most
        part = real(*arguments)
        alive.append(weakref.ref(part))
        gc.collect()
        most = max(most, sum(one() is not None for one in alive))
        return part

    monkeypatch.setattr(module, "hold", counted)
    parts = parts_of(model)
    with closing(held_ahead(model, parts)) as ahead:
        for _ in parts:
            part = next(ahead)
            del part
    assert len(alive) == len(parts)
    assert most <= 2


def test_closing_stops_what_is_being_read(model: Checkpoint, monkeypatch: pytest.MonkeyPatch, read: list[str]) -> None:
    parts = parts_of(model)
    with closing(held_ahead(model, parts)) as ahead:
        next(ahead)
    done = len(read)
    assert len(parts[0]) <= done <= len(parts[0]) + len(parts[1])
    assert not any(name in read for name in parts[2])


def test_a_file_that_is_cut_off_is_named_when_its_part_is_due(tmp_path: Path) -> None:
    model = open_folder(make(tmp_path / "model", shards=1))
    first, *_, last = sorted(model.tensors.values(), key=lambda info: info.start)
    with last.file.open("rb+") as stream:
        stream.truncate(last.end - 1)
    ahead = held_ahead(model, [[first.name], [last.name]])
    next(ahead)
    with pytest.raises(CheckpointError, match=f"{last.name}: the file is truncated"):
        next(ahead)
