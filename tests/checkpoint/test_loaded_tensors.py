"""Parts of a checkpoint in memory: the same tensors, each byte read once, one part ahead and never more."""

from __future__ import annotations

import hashlib
import json
import random
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny import make
from torch.utils._python_dispatch import TorchDispatchMode

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint import loaded_tensors as module
from quantizers.checkpoint.loaded_tensors import (
    LoadedTensors,
    bytes_needed,
    layer_names,
    load_tensors,
    ranges,
    tensors_in_memory,
)
from quantizers.checkpoint.prefetch import prefetched_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.checkpoint.safetensors_header import DTYPE_BYTES, read_header
from quantizers.checkpoint.tensor_bytes import DTYPES
from quantizers.system.errors import CheckpointError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_folder(make(tmp_path_factory.mktemp("held") / "model", num_hidden_layers=4))


@dataclass
class Read:
    """One call that read bytes of a file."""

    file: Path
    start: int
    size: int


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """What was read, in its order."""
    calls, real = list[Read](), module.read_into

    def counted(file: Path, start: int, view: memoryview, name_at: Any) -> None:
        calls.append(Read(file, start, len(view)))
        real(file, start, view, name_at)

    monkeypatch.setattr(module, "read_into", counted)
    return calls


def parts_of(model: Checkpoint) -> list[list[str]]:
    facts = architecture_for(model.config, "config.json")
    return [layer_names(model, facts, number) for number in range(model.config["num_hidden_layers"])]


def test_a_part_answers_as_the_checkpoint_does(model: Checkpoint) -> None:
    names = parts_of(model)[1]
    part = load_tensors(model, names)
    assert set(part.tensors) == set(names)
    for name in names:
        assert torch.equal(part.tensor(name).view(torch.uint8), model.tensor(name).view(torch.uint8))
        assert part.raw(name) == model.raw(name)
        assert part.sha256(name) == model.sha256(name) == hashlib.sha256(model.raw(name)).hexdigest()
    assert (part.folder, part.config, part.name) == (model.folder, model.config, model.name)


def test_a_part_has_no_other_tensors(model: Checkpoint) -> None:
    first, second = parts_of(model)[:2]
    part = load_tensors(model, first)
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
    part = load_tensors(model, parts_of(model)[0])
    assert part.digest() == load_tensors(model, parts_of(model)[0]).digest()
    name = next(iter(part.stored))
    other = {**part.stored, name: part.tensor(name).clone()}
    other[name].view(torch.uint8).view(-1)[0] ^= 1
    assert tensors_in_memory(model, other, Path("x")).digest() != part.digest()
    assert tensors_in_memory(model, part.stored, Path("x")).digest() == part.digest()


def test_every_dtype_that_can_be_written_can_be_held(tmp_path: Path, model: Checkpoint) -> None:
    tensors = {name: torch.zeros(3, 2).to(getattr(torch, own)) for name, own in DTYPES.items()}
    tensors["empty"] = torch.empty(0, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    written = open_folder(tmp_path)
    made = tensors_in_memory(model, tensors, tmp_path / "model.safetensors")
    for name, info in written.tensors.items():
        assert (made.tensors[name].dtype, made.tensors[name].shape) == (info.dtype, info.shape)
        assert made.sha256(name) == load_tensors(written, [name]).sha256(name)


def test_each_part_comes_in_its_turn_and_each_byte_is_read_once(model: Checkpoint, read: list[Read]) -> None:
    parts = parts_of(model)
    for names, part in zip(parts, prefetched_tensors(model, parts), strict=True):
        assert set(part.stored) == set(names)
    found = sorted((one.file, one.start, one.start + one.size) for one in read)
    assert all(one[0] != after[0] or one[2] <= after[1] for one, after in pairwise(found))
    assert sum(one.size for one in read) == sum(model.tensors[name].size for names in parts for name in names)
    assert list(prefetched_tensors(model, [])) == []


def published_layout(folder: Path) -> Checkpoint:
    """MiniMax-M2.1's layers in names and dtypes, in tiny matrices: 256 experts, and a layer's end in the next shard."""
    c = tiny.config(num_local_experts=256, hidden_size=8, intermediate_size=4, num_attention_heads=1, vocab_size=8)
    every = tiny.tensors(c | {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 3})
    names = sorted(every)
    cuts = [0, len(names) // 5, len(names) // 2, len(names)]
    folder.mkdir()
    weight_map = {}
    for number, (start, end) in enumerate(pairwise(cuts)):
        file = f"model-{number}.safetensors"
        save_file({name: every[name] for name in names[start:end]}, folder / file)
        weight_map.update(dict.fromkeys(names[start:end], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(c | {"num_hidden_layers": 3}))
    return open_folder(folder)


def test_a_published_layer_is_read_in_a_few_pieces(tmp_path: Path, read: list[Read]) -> None:
    """1,550 tensors in up to two shards, in which the library sorts them by dtype and then by name."""
    checkpoint = published_layout(tmp_path / "model")
    for names in parts_of(checkpoint):
        read.clear()
        part = load_tensors(checkpoint, names)
        assert len(names) > 1500
        assert len(read) <= 6  # and one more for each GiB: at most 10 for a layer of 3.7 GB
        assert all(part.raw(name) == checkpoint.raw(name) for name in names[::97])
    assert len({checkpoint.tensors[name].file for name in parts_of(checkpoint)[0]}) == 2


def random_layout(folder: Path, seed: int) -> tuple[Checkpoint, dict[str, bytes]]:
    """Tensors of all dtypes and odd sizes in three files, in random order, so that many are misaligned; their bytes."""
    dice = random.Random(seed)
    folder.mkdir()
    content: dict[str, bytes] = {}
    for number in range(3):
        header, data = dict[str, Any](), b""
        for i in range(dice.randint(1, 12)):
            dtype, count = dice.choice([name for name in DTYPES if name != "BOOL"]), dice.choice([0, 1, 2, 3, 5, 8])
            name, raw = f"{number}.{i}", dice.randbytes(count * DTYPE_BYTES[dtype])
            header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [len(data), len(data) + len(raw)]}
            data, content[name] = data + raw, raw
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % dice.choice([8, 1]))  # not every program pads its header
        (folder / f"{number}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    tensors = {k: v for n in range(3) for k, v in read_header(folder / f"{n}.safetensors").items()}
    return Checkpoint(folder, "random", {}, tensors), content


@pytest.mark.parametrize("seed", range(40))
def test_any_layout_is_read_as_it_lies(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the bytes that the files were written from, for a random choice of tensors, in pieces of any size."""
    checkpoint, content = random_layout(tmp_path / "model", seed)
    dice = random.Random(seed)
    names = dice.sample(sorted(content), dice.randint(0, len(content)))
    monkeypatch.setattr(module, "PIECE", dice.choice([1, 7, 64, 2**30]))
    buffer = torch.zeros(dice.choice([1, 4096]), dtype=torch.uint8)
    part = load_tensors(checkpoint, names, buffer=buffer)
    found = ranges(part.tensors.values())
    assert [name for name in names if bytes(part.raw(name)) != content[name]] == []
    assert {n: part.sha256(n) for n in names} == {n: hashlib.sha256(content[n]).hexdigest() for n in names}
    for one, after in pairwise(found):
        assert one.place + one.size <= after.place
        assert (one.infos[0].file, one.start + one.size) != (after.infos[0].file, after.start)
    assert all(one.place % 8 == one.start % 8 for one in found)
    some = part.only(names[::2])
    buffer.fill_(255)
    assert [n for n in names[::2] if bytes(some.raw(n)) != content[n]] == []


def test_two_buffers_take_turns(model: Checkpoint) -> None:
    """They are as large as the largest part needs, and no part of a layer is in memory of its own."""
    parts = parts_of(model)
    parts = [parts[0][:5], *parts[1:]]
    places, sizes = [], []
    for part in prefetched_tensors(model, parts):
        assert part.buffer is not None
        inside = range(part.buffer.data_ptr(), part.buffer.data_ptr() + part.buffer.nbytes)
        assert all(tensor.data_ptr() in inside for tensor in part.stored.values())
        places.append(part.buffer.untyped_storage().data_ptr())
        sizes.append(part.buffer.untyped_storage().nbytes())
    assert places[0] == places[2] != places[1] == places[3]
    assert len(set(sizes)) == 1
    assert sizes[0] == max(bytes_needed(model.tensors[name] for name in names) for names in parts)


def test_a_tensor_keeps_its_bytes_until_the_next_part_is_asked_for(model: Checkpoint) -> None:
    """However far the thread has read; and whoever still has the part afterwards finds nothing in it."""
    parts = parts_of(model)
    with closing(prefetched_tensors(model, parts)) as ahead:
        before: LoadedTensors | None = None
        for number, part in enumerate(ahead):
            time.sleep(0.05)  # the thread reads the next one meanwhile
            assert all(part.raw(name) == model.raw(name) for name in parts[number])
            if before is not None:
                assert not before.stored
                with pytest.raises(KeyError):
                    before.tensor(parts[number - 1][0])
                assert before.digest() == load_tensors(model, parts[number - 1]).digest()
            before = part


def test_a_part_on_a_device_is_one_copy_and_keeps_its_hashes(model: Checkpoint) -> None:
    """Asked of the meta device, which every machine has."""
    part = load_tensors(model, parts_of(model)[0])
    assert part.to(torch.device("cpu")) is part
    copies = list[int]()

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                copies.append(args[0].nbytes)
            return function(*args, **(kwargs or {}))

    with Copies():
        moved = part.to(torch.device("meta"))
    assert part.buffer is not None
    assert copies == [part.buffer.nbytes]
    for name, tensor in part.stored.items():
        there = moved.tensor(name)
        assert (there.device.type, there.dtype, there.shape) == ("meta", tensor.dtype, tensor.shape)
        assert there.storage_offset() == tensor.storage_offset()
    assert moved.digest() == part.digest()
    assert moved.tensors == part.tensors


@pytest.mark.parametrize("after", [0, 1, 5])
def test_reading_ends_between_two_pieces_once_it_is_stopped(
    after: int, model: Checkpoint, monkeypatch: pytest.MonkeyPatch, read: list[Read]
) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    stop, counted = Event(), module.read_into

    def stopping(*arguments: Any) -> None:
        counted(*arguments)
        if len(read) == after:
            stop.set()

    monkeypatch.setattr(module, "read_into", stopping)
    if not after:
        stop.set()
    load_tensors(model, parts_of(model)[0], stop)
    assert len(read) == after


def test_closing_stops_what_is_being_read(model: Checkpoint, read: list[Read]) -> None:
    parts = parts_of(model)
    with closing(prefetched_tensors(model, parts)) as ahead:
        next(ahead)
    done = sum(one.size for one in read)
    sizes = [sum(model.tensors[name].size for name in names) for names in parts]
    assert sizes[0] <= done <= sizes[0] + sizes[1]


def test_a_file_that_is_cut_off_is_named_when_its_part_is_due(tmp_path: Path) -> None:
    model = open_folder(make(tmp_path / "model", shards=1))
    first, *_, last = sorted(model.tensors.values(), key=lambda info: info.start)
    with last.file.open("rb+") as stream:
        stream.truncate(last.end - 1)
    ahead = prefetched_tensors(model, [[first.name], [last.name]])
    next(ahead)
    with pytest.raises(CheckpointError, match=f"{last.name}: the file is truncated"):
        next(ahead)


@pytest.mark.parametrize("pieces", [64, 2**30])
def test_the_tensor_at_which_a_file_ends_is_named(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its whole range is read at once."""
    monkeypatch.setattr(module, "PIECE", pieces)
    model = open_folder(make(tmp_path / "model", shards=1))
    inner = sorted(model.tensors.values(), key=lambda info: info.start)[7]
    with inner.file.open("rb+") as stream:
        stream.truncate(inner.start + 1)
    with pytest.raises(CheckpointError, match=f"{inner.name}: the file is truncated; download this shard again"):
        load_tensors(model, model.tensors)
    inner.file.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(model, model.tensors)
